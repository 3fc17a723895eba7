"""Write and load checkpoints (adapter and training state). If the program crashes while it writes one, earlier
checkpoints stay complete.

A checkpoint file is the zip file that torch writes, followed by the SHA-256 checksum of all its bytes; readers of zip
files ignore what follows the zip. The zip itself has a checksum for each entry but none for its directory of entries,
in which one flipped bit can make torch load uninitialised memory.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from qerl_pl.base.digest import base_digest
from qerl_pl.common.files import replacing
from qerl_pl.common.run_folder import LAST, PREVIOUS
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.lora_experts import of_experts
from qerl_pl.policy.start import digest

MARK = b"qerl-pl sha256:"
TRAILER = len(MARK) + hashlib.sha256().digest_size  # bytes
PROBE = 2**20  # bytes that are written as a test of whether the disk is full
PARTS = {"state_dict": dict, "optimizer_states": list, "global_step": int}
HIGHEST_STEP = 2**53  # curves have steps as doubles, which represent all integers up to 2^53
MOVED = (
    "the files were changed, or the model's main branch on the hub has moved; `hf download NAME --revision COMMIT "
    "--local-dir FOLDER` gets the old files)"
)
FILES = {
    "base": f" (digests of config.json and weights: {MOVED}",
    "end_tokens": f" (in generation_config.json, config.json and the tokenizer's files: {MOVED}",
}
"""Hints for error messages about those entries of a run's identity that are read from files of the base; the keys are
the entries' names."""
BLOCK, ALIGNMENT = 2**26, 64  # bytes: host memory that is allocated at once, and alignment of each tensor's copy in it


class Damaged(Exception):
    """Raised for a checkpoint file whose bytes differ from those that were written, or that this program did not
    write."""


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning plugin that writes checkpoint files atomically and verifies their checksum when it reads them. If
    ``last.ckpt`` is damaged, ``previous.ckpt`` is loaded. A large checkpoint (1 GB for an adapter of rank 32 on a 7B
    model with Adam) can be written by a background thread from a copy in host memory; the next checkpoint is copied to
    the same memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._host: list[Tensor] = []  # host copy of the last checkpoint's tensors, which the writing thread reads
        self._kinds: list[tuple[torch.Size, torch.dtype, bool]] = []  # shape, dtype and is_cuda of the copied tensors
        self.damaged: Path | None = None
        """The damaged ``last.ckpt`` in place of which ``previous.ckpt`` was loaded; None if none was damaged."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint. The caller may modify ``checkpoint`` as soon as this method returns. If
        ``storage_options`` is ``{"background_bytes": n}``, a checkpoint whose tensors take at least n bytes is written
        by a background thread; ``wait`` waits for it. Raises OSError if this checkpoint, or the previous one in the
        background, could not be written."""
        self.wait()
        background_bytes = (storage_options or {}).get("background_bytes")
        tensors = _tensors(checkpoint)
        if background_bytes is None or sum(tensor.nbytes for tensor in tensors) < background_bytes:
            write_checkpoint(checkpoint, Path(path))
            return
        self._writing = self._in_background(write_checkpoint, self._copy(checkpoint, tensors), Path(path))

    def is_written(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Wait until the background thread has written the checkpoint. Raises OSError if it could not write it."""
        writing = self._writing
        if writing is not None:
            # if Ctrl-C interrupts this line, ``_writing`` keeps its value, because the thread still writes the file
            wait_for([writing])
            self._writing = None
            writing.result()

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, replacing an existing file. The background thread lets the file system free
        the disk blocks of the replaced file, which takes 0.2 seconds for 1 GB."""
        # Holding the overwritten file open delays the freeing of its blocks until the background thread closes it.
        old = target.open("rb") if target.exists() else None
        os.replace(source, target)
        if old is not None:
            self._in_background(old.close)

    def teardown(self) -> None:
        """Wait for the background thread, end it and free the host memory."""
        try:
            self.wait()
        finally:
            self._host, self._kinds = [], []
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _in_background(self, function: Callable[..., None], *args: object) -> Future[None]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        return self._thread.submit(function, *args)

    def _copy(self, checkpoint: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the checkpoint with copies of its ``tensors`` in host memory. If the tensors have the shapes, dtypes
        and devices of those in the previous call, their copies overwrite the previous copies, so the previous
        checkpoint must already be on disk."""
        kinds = [(tensor.shape, tensor.dtype, tensor.is_cuda) for tensor in tensors]
        if kinds != self._kinds:
            self._host = []  # frees it
            self._host, self._kinds = _host_memory(tensors), kinds
        for host, tensor in zip(self._host, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        copies = iter(self._host)
        return apply_to_collection(checkpoint, Tensor, lambda tensor: next(copies))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. A file counts as damaged if its bytes are not those that were written, or if it holds
        something that no run of this program writes, such as objects other than tensors and plain values, or NaN. In
        place of a damaged ``last.ckpt``, a ``previous.ckpt`` that is not damaged is loaded, with a warning. Raises
        ValueError if the file is damaged and there is no such replacement, and FileNotFoundError or PermissionError if
        it cannot be opened."""
        path = Path(path)
        try:
            return self._load(path, map_location)
        except ValueError as error:
            previous = path.with_name(PREVIOUS)
            if path.name != LAST or not previous.exists():
                raise
            try:
                checkpoint = self._load(previous, map_location)
            except ValueError as second:
                raise ValueError(f"{error}\n{second}") from second
            self.damaged = path
            rank_zero_warn(f"{str(error).partition(';')[0]}; going on from {previous}, the one before it")
            return checkpoint

    def _load(self, path: Path, map_location: Any) -> dict[str, Any]:
        try:
            checkpoint = read_checkpoint(path, map_location or "cpu")
            # in a file whose name starts with a dot, Lightning passes weights between processes; it is no checkpoint
            if not path.name.startswith("."):
                check_contents(checkpoint)
            return checkpoint
        except (FileNotFoundError, PermissionError):
            raise
        except (Damaged, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"the checkpoint {path} is damaged or not one of this program ({reason}); give "
                "another one by --ckpt_path (last, best or a .ckpt file of a run), or start anew with another --run_dir"
            ) from error


def _tensors(checkpoint: dict[str, Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    apply_to_collection(checkpoint, Tensor, lambda tensor: tensors.append(tensor.detach()))
    return tensors


def _host_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocate host memory for copies of tensors, pinned for tensors on a GPU, so that copying is asynchronous."""
    # Allocating pinned memory takes milliseconds, and the adapter of a 7B model and its optimizer have over a thousand
    # tensors, so blocks for several tensors are allocated. Each copy nevertheless gets a storage object that covers
    # only its part of the block, because torch writes a tensor's whole storage to the file.
    copies, blocks = [], {}
    for tensor in tensors:
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if tensor.is_cuda not in blocks or len(blocks[tensor.is_cuda]) < size:
            block = torch.empty(max(size, BLOCK), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            blocks[tensor.is_cuda] = block.numpy()
        left = blocks[tensor.is_cuda]
        blocks[tensor.is_cuda] = left[size:]
        if tensor.nbytes:
            memory = torch.frombuffer(left, dtype=tensor.dtype, count=tensor.numel())  # keeps the block alive
        else:
            memory = torch.empty(0, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies.append(memory.view(tensor.shape))
    return copies


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically; raises OSError if the disk is full or not writable."""
    try:
        with replacing(path) as temporary:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # torch reports a full disk as a RuntimeError
                raise _refusal(temporary) or OSError(str(error)) from error
            with temporary.open("rb+") as file:
                checksum = _checksum(file, file.seek(0, os.SEEK_END))
                file.seek(0, os.SEEK_END)
                file.write(MARK + checksum)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"could not write the checkpoint {path}: {reason}; earlier ones are untouched") from error


def read_checkpoint(path: Path, map_location: Any) -> dict[str, Any]:
    """Load a checkpoint file. Raises ``Damaged`` if the checksum does not match, or the file does not contain a dict of
    tensors and objects of Python's built-in types."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - TRAILER
        file.seek(max(size, 0))
        trailer = file.read()
        if size < 0 or not trailer.startswith(MARK):
            raise Damaged("it does not end with the checksum that was written")
        if _checksum(file, size) != trailer[len(MARK) :]:
            raise Damaged("its bytes are not what was written")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message advises to load code, too
        raise Damaged("it holds other objects than tensors and plain values, which are never loaded") from error
    if not isinstance(checkpoint, dict):
        raise Damaged(f"it holds a {type(checkpoint).__name__}; expected a checkpoint's dict")
    return checkpoint


def check_contents(checkpoint: Mapping[str, Any]) -> None:
    """Raise ``Damaged`` if an entry is missing or of a wrong type, or holds a number that is NaN or infinite."""
    for name, kind in PARTS.items():
        if not isinstance(checkpoint.get(name), kind):
            fault = f"is a {type(checkpoint[name]).__name__}" if name in checkpoint else "is missing"
            raise Damaged(f"{name} {fault}; expected a {kind.__name__}: it was not written by a run of this program")
    if not 0 <= checkpoint["global_step"] < HIGHEST_STEP:
        raise Damaged(f"global_step is {checkpoint['global_step']}; expected 0 or more optimizer steps")
    for name in ("state_dict", "optimizer_states"):
        apply_to_collection(checkpoint[name], Tensor, _check_finite, part=name)


def _check_finite(tensor: Tensor, *, part: str) -> Tensor:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise Damaged(f"{part} holds numbers that are not finite (nan or inf)")
    return tensor


def _refusal(path: Path) -> OSError | None:
    """Find out why torch failed to write a file, since its error does not say it: try to append bytes. Returns the
    operating system's error; None if appending works."""
    try:
        with path.open("ab") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _checksum(file: BinaryIO, size: int) -> bytes:
    """Compute the SHA-256 of the first ``size`` bytes of a file."""
    checksum, left = hashlib.sha256(), size
    file.seek(0)
    while left and (chunk := file.read(min(left, 2**20))):
        checksum.update(chunk)
        left -= len(chunk)
    return checksum.digest()


def run_identity(*, base: str, lora: LoraSettings, seed: int) -> dict[str, Any]:
    """Return what identifies a run and is stored in its checkpoints: a digest of the base's files, the adapter settings
    and the seed. Only a run for which all of these equal the stored ones can resume a checkpoint."""
    settings = asdict(lora)
    del settings["start"]
    if lora.start is not None:
        settings["start"] = digest(lora.starts_at.tensors)
    settings["targets"] = sorted(settings["targets"])
    settings["expert_rank"] = lora.expert_rank or 0
    return {"base": base_digest(base), "seed": seed, **{f"lora.{name}": value for name, value in settings.items()}}


def lora_settings(identity: Mapping[str, Any]) -> LoraSettings:
    """Extract the adapter's settings from a run's identity."""
    settings = {name.removeprefix("lora."): value for name, value in identity.items() if name.startswith("lora.")}
    settings.pop("start", None)  # a digest; the checkpoint holds the adapter
    return LoraSettings(**{"expert_rank": 0, **settings, "targets": tuple(settings["targets"])})


def adapter_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the adapter's tensors in a checkpoint. Raises ValueError if a tensor is not fp32, if a linear layer has
    only one of its LoRA matrices A [r, K] and B [N, r], or if r is not the rank in the run's settings (for the stacked
    matrices of experts, a multiple of it).
    """
    adapter, identity = checkpoint.get("state_dict"), identity_of(checkpoint)
    if not isinstance(adapter, dict) or not adapter:
        raise ValueError("the checkpoint holds no adapter: it was not written by a run of this program")
    for name, tensor in adapter.items():
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"the checkpoint's adapter tensor {name} is of {kind}; expected torch.float32")
        linear, lora, matrix = name.partition(".lora_")
        if not lora:
            continue
        other = f"{linear}.lora_{'B' if matrix == 'A.weight' else 'A'}.weight"
        if matrix not in ("A.weight", "B.weight") or other not in adapter:
            raise ValueError(f"the checkpoint's adapter has {name} and not {other}")
        rank = identity.get("lora.expert_rank" if of_experts(name) else "lora.rank")
        held = tensor.shape[0 if matrix == "A.weight" else 1] if tensor.ndim == 2 else 0
        if not held or not rank or (held % rank if of_experts(name) else held != rank):
            raise ValueError(f"the checkpoint's adapter tensor {name} is {list(tensor.shape)}; expected rank {rank}")
    return adapter


def check_training_state(checkpoint: Mapping[str, Any], *, max_steps: int) -> None:
    """Raise ValueError if an entry of the training state is missing or of a wrong type, or more than ``max_steps``
    optimizer steps are already done."""
    parts = {"loops": dict, "callbacks": dict, "optimizer_states": list, "lr_schedulers": list, "global_step": int}
    for name, kind in parts.items():
        part = checkpoint.get(name)
        states = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if not isinstance(part, kind) or not all(isinstance(state, dict) for state in states):
            raise ValueError(
                f"the checkpoint's {name} is missing or not what a run writes, so training cannot go on from it; give "
                "another checkpoint by --ckpt_path, or start anew with another --run_dir"
            )
    if checkpoint["global_step"] > max_steps:
        raise ValueError(
            f"trainer.max_steps is {max_steps} and the checkpoint has done {checkpoint['global_step']} optimizer "
            "steps; raise trainer.max_steps"
        )


def identity_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run's identity (``run_identity``) in a checkpoint. Raises ValueError if there is none."""
    identity = checkpoint.get("identity")
    if not isinstance(identity, Mapping) or "base" not in identity:
        raise ValueError(
            "the checkpoint does not name the base that it was trained on: it was not written by a run of this program"
        )
    return identity


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint belongs to a run with another base, seed or adapter settings. ``saved`` has the
    base's digest, the seed and the settings that the checkpoint stores, ``current`` those of the run that would load
    it; the message lists all differences."""
    saved = {"lora.expert_rank": 0, **saved}  # checkpoints of earlier versions lack the rank where it is 0
    differences = [
        f"{'seed_everything' if name == 'seed' else f'model.{name}'}: the run has {json.dumps(saved.get(name))}, "
        f"this start has {json.dumps(value)}{FILES.get(name, '')}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differences:
        raise ValueError(
            "this checkpoint is of another run; start in a new --run_dir or set back:\n  " + "\n  ".join(differences)
        )


def tokens_as_before(before: int, now: int) -> int:
    """Choose the limit on the tokens of a training pass in a resumed run: ``before``, the limit before the
    interruption, or ``now``, the limit for which there is memory now, whichever is smaller. In other micro-batches sums
    would be rounded in another way, so the resumed run would not equal one that was never interrupted; if the limit
    becomes lower than before, there is a warning."""
    if before > now:
        rank_zero_warn(
            f"there is memory for {now} tokens in a pass, and before the interruption a pass had up to {before}: the "
            "run goes on, but its last bits may differ from those of a run that was never interrupted"
        )
    elif before < now:
        rank_zero_info(
            f"a pass has up to {before} tokens, as before the interruption; model.micro_batch_tokens sets another limit"
        )
    return min(before, now)
