"""Checkpoints: the adapter and what training needs to go on, written so that a crash loses nothing."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from qerl_pl import checkpoint_file
from qerl_pl.base.digest import base_digest
from qerl_pl.checkpoint_file import Damaged
from qerl_pl.policy.lora import LoraSettings

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, so that a full disk or a kill leaves the old file as it was; a damaged
    ``last.ckpt`` falls back to the one before it.

    A large checkpoint may be written while training goes on: with Adam, a 7B policy's adapter of rank 32 takes 1 GB. It
    is copied to host memory first, which is kept for the next one until ``teardown``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._host: list[Tensor] = []  # of the last copy, tensor by tensor; read while it is written
        self.damaged: Path | None = None
        """The file for which the last load took the one before it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint, whole or not at all.

        Args:
            checkpoint: may change as soon as this returns.
            path: of the file.
            storage_options: ``{"background_bytes": n}`` returns before the file is written if tensors take n bytes or
                more; ``wait`` tells when it is.

        Raises:
            OSError: the disk is full or not writable; the checkpoints that were there are untouched. Also where the
                one before this one was written in the background and failed.
        """
        self.wait()
        background_bytes = (storage_options or {}).get("background_bytes")
        tensors = _tensors(checkpoint)
        if background_bytes is None or sum(tensor.nbytes for tensor in tensors) < background_bytes:
            checkpoint_file.write(checkpoint, Path(path))
            return
        self._writing = self._in_background(checkpoint_file.write, self._copy(checkpoint, tensors), Path(path))

    def is_written(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Until no file is being written.

        Raises:
            OSError: the checkpoint that was written in the background could not be written.
        """
        writing = self._writing
        if writing is not None:
            wait_for([writing])  # Ctrl-C may cut this short, and the file is still being written then
            self._writing = None
            writing.result()

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file over another, and return before that one's space is free: of 1 GB it takes a fifth of a second.

        Raises:
            OSError: there is no source, or it cannot be renamed.
        """
        old = target.open("rb") if target.exists() else None  # while it is open, its space is not freed
        os.replace(source, target)
        if old is not None:
            self._in_background(old.close)

    def teardown(self) -> None:
        """Write what is left to write, end the thread, and let go of the host memory."""
        try:
            self.wait()
        finally:
            self._host = []
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _in_background(self, function: Callable[..., None], *args: object) -> Future[None]:
        """One after another."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        return self._thread.submit(function, *args)

    def _copy(self, checkpoint: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        """On the host, with its tensors in the memory of the copy before it, which must have been written.

        A tensor whose forerunner had another shape or dtype gets new memory.
        """
        self._host = [_host_memory(*pair) for pair in zip(tensors, chain(self._host, repeat(None)), strict=False)]
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        copies = iter(self._host)
        return apply_to_collection(checkpoint, Tensor, lambda tensor: next(copies))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors and builtins only; a damaged ``last.ckpt`` falls back to the one before it.

        Raises:
            ValueError: the file is damaged and there is nothing to fall back to; every damaged file is named.
        """
        path = Path(path)
        try:
            return self._load(path, map_location)
        except ValueError as error:
            previous = path.with_name(PREVIOUS)
            if path.name != LAST or not previous.exists():
                raise
            try:
                found = self._load(previous, map_location)
            except ValueError as second:
                raise ValueError(f"{error}\n{second}") from second
            self.damaged = path
            rank_zero_warn(f"{str(error).partition(';')[0]}; going on from {previous}, the one before it")
            return found

    def _load(self, path: Path, map_location: Any) -> dict[str, Any]:
        try:
            found = checkpoint_file.read(path, map_location or "cpu")
            if not path.name.startswith("."):  # in hidden files Lightning hands weights from process to process
                checkpoint_file.check_contents(found)
            return found
        except (FileNotFoundError, PermissionError):
            raise
        except (Damaged, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"the checkpoint {path} is damaged ({str(error).splitlines()[0]}); give another one by --ckpt_path, or "
                "delete it to start anew"
            ) from error


def _tensors(checkpoint: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(checkpoint, Tensor, lambda tensor: found.append(tensor.detach()))
    return found


def _host_memory(tensor: Tensor, before: Tensor | None) -> Tensor:
    """For a copy of the tensor: pinned for one on a GPU, which then copies without the host."""
    wanted = (tensor.shape, tensor.dtype, tensor.is_cuda)
    if before is not None and (before.shape, before.dtype, before.is_pinned()) == wanted:
        return before
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def run_identity(*, base: str, lora: LoraSettings, seed: int) -> dict[str, Any]:
    """What a policy must be loaded with: the base (by content, not by path), the adapter's shape, the seed."""
    settings = asdict(lora)
    settings["targets"] = sorted(settings["targets"])
    return {"base": base_digest(base), "seed": seed, **{f"lora.{name}": value for name, value in settings.items()}}


def lora_settings(identity: Mapping[str, Any]) -> LoraSettings:
    """The adapter's, of a run's identity."""
    found = {name.removeprefix("lora."): value for name, value in identity.items() if name.startswith("lora.")}
    return LoraSettings(**{**found, "targets": tuple(found["targets"])})


def identity_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The identity that a checkpoint was written with.

    Raises:
        ValueError: it has none.
    """
    found = checkpoint.get("identity")
    if not isinstance(found, Mapping) or "base" not in found:
        raise ValueError("the checkpoint does not say of which base it is: it was not written by a run of this program")
    return found


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that was started with other settings.

    Raises:
        ValueError: lists every difference, the run's value first.
    """
    differences = [
        f"{name}: the run has {json.dumps(saved.get(name))}, this start has {json.dumps(value)}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differences:
        raise ValueError(
            "this checkpoint is of another run; start in a new --run_dir or set back:\n  " + "\n  ".join(differences)
        )
