"""Write and read checkpoint files. A file is written atomically and ends with a checksum of all its bytes, which is
checked when the file is read.

torch writes a zip file, which has a checksum for each entry but none for the zip's directory of entries. One flipped
bit in this directory can make torch load uninitialised memory. Therefore the SHA-256 of the whole zip is appended to
it; readers of zip files ignore bytes after the zip's end.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from qerl_pl.common.files import replacing

MARK = b"qerl-pl sha256:"
TRAILER = len(MARK) + hashlib.sha256().digest_size  # bytes
PROBE = 2**20  # bytes of a test write that finds out whether the disk is full
PARTS = {"state_dict": dict, "optimizer_states": list, "global_step": int}
HIGHEST_STEP = 2**53  # curves have steps as doubles, which represent all integers up to 2^53


class Damaged(Exception):
    """Raised for a file that differs from what was written, or does not hold a checkpoint of this program."""


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint to a temporary file and rename it to ``path``.

    Raises:
        OSError: the disk is full or not writable; the old file is left intact.
    """
    try:
        with replacing(path) as temporary:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # torch reports a full disk as a RuntimeError
                raise _refusal(temporary) or OSError(str(error)) from error
            with temporary.open("rb+") as file:
                digest = _digest(file, file.seek(0, os.SEEK_END))
                file.seek(0, os.SEEK_END)
                file.write(MARK + digest)
    except OSError as error:
        said = error.strerror or error
        raise OSError(f"could not write the checkpoint {path}: {said}; earlier ones are untouched") from error


def read(path: Path, map_location: Any) -> dict[str, Any]:
    """Load tensors and objects of Python's built-in types from a checkpoint file after checking its checksum.

    Raises:
        Damaged: the checksum does not match, or the content is not a dict.
        FileNotFoundError, PermissionError: the file does not exist, or may not be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - TRAILER
        file.seek(max(size, 0))
        trailer = file.read()
        if size < 0 or not trailer.startswith(MARK):
            raise Damaged("it does not end with the checksum that was written")
        if _digest(file, size) != trailer[len(MARK) :]:
            raise Damaged("its bytes are not what was written")
    try:
        found = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to load code, too
        raise Damaged("it holds other objects than tensors and plain values, which are never loaded") from error
    if not isinstance(found, dict):
        raise Damaged(f"it holds a {type(found).__name__}; expected a checkpoint's dict")
    return found


def check_contents(checkpoint: Mapping[str, Any]) -> None:
    """Check that a checkpoint has everything that resuming needs, with finite numbers.

    Raises:
        Damaged: a part is missing or wrong; the message names the part and what is wrong with it.
    """
    for name, kind in PARTS.items():
        if not isinstance(checkpoint.get(name), kind):
            found = f"is a {type(checkpoint[name]).__name__}" if name in checkpoint else "is missing"
            raise Damaged(f"{name} {found}; expected a {kind.__name__}: it was not written by a run of this program")
    if not 0 <= checkpoint["global_step"] < HIGHEST_STEP:
        raise Damaged(f"global_step is {checkpoint['global_step']}; expected 0 or more optimizer steps")
    for name in ("state_dict", "optimizer_states"):
        apply_to_collection(checkpoint[name], Tensor, _check_finite, part=name)


def _check_finite(tensor: Tensor, *, part: str) -> Tensor:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise Damaged(f"{part} holds numbers that are not finite (nan or inf)")
    return tensor


def _refusal(path: Path) -> OSError | None:
    """Return the operating system's error if appending bytes to a file fails, and None if it succeeds. This finds out
    why torch could not write the file, since torch's error does not say so."""
    try:
        with path.open("ab") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _digest(file: BinaryIO, size: int) -> bytes:
    """Compute the SHA-256 of the first ``size`` bytes of a file."""
    digest, left = hashlib.sha256(), size
    file.seek(0)
    while left and (chunk := file.read(min(left, 2**20))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.digest()
