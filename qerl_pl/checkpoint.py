"""Write and load checkpoints (adapter and training state), so that a crash never damages the last written one."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict
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
from qerl_pl.common.run_folder import LAST, PREVIOUS
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.start import digest

OTHER_BASE = (
    " (digests of config.json and weights: the files were changed, or the model's main branch on the hub has moved; "
    "`hf download NAME --revision COMMIT --local-dir FOLDER` gets the old files)"
)
BLOCK, ALIGNMENT = 2**26, 64  # bytes of host memory for copies that are allocated together, and of a tensor's place


class SafeCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin for checkpoint files. It writes to a temporary file and renames it, so that a full disk or a
    killed process leaves the previous checkpoint intact.

    If ``last.ckpt`` is damaged, ``previous.ckpt`` is loaded. A large checkpoint (1 GB for an adapter of rank 32 on a 7B
    model with Adam) can be written by a background thread. Before that, its tensors are copied to host memory, which is
    reused for the next checkpoint until ``teardown``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._host: list[Tensor] = []  # host copy of the last checkpoint's tensors, which the writing thread reads
        self._kinds: list[tuple[torch.Size, torch.dtype, bool]] = []  # of these tensors, and whether they are on a GPU
        self.damaged: Path | None = None
        """Path of the damaged ``last.ckpt`` in place of which ``previous.ckpt`` was loaded; None if none was
        damaged."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; if this fails, an existing file at the path is left intact.

        Args:
            checkpoint: content of the checkpoint; it may be modified as soon as this method returns.
            path: path of the file.
            storage_options: with ``{"background_bytes": n}``, a checkpoint whose tensors take at least n bytes is
                written in the background; ``wait`` waits for it.

        Raises:
            OSError: the disk is full or not writable, or the last write in the background failed.
        """
        self.wait()
        background_bytes = (storage_options or {}).get("background_bytes")
        tensors = _tensors(checkpoint)
        if background_bytes is None or sum(tensor.nbytes for tensor in tensors) < background_bytes:
            checkpoint_file.write(checkpoint, Path(path))
            return
        self._writing = self._in_background(checkpoint_file.write, self._copy(checkpoint, tensors), Path(path))

    def is_written(self) -> bool:
        """Return whether the background thread has finished writing, so that ``wait`` would return at once."""
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Wait until the background thread has finished writing.

        Raises:
            OSError: a checkpoint could not be written in the background.
        """
        writing = self._writing
        if writing is not None:
            # if Ctrl-C interrupts the waiting, ``_writing`` is kept, because the thread still writes the file
            wait_for([writing])
            self._writing = None
            writing.result()

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file over another without waiting until the overwritten file's blocks are freed (0.2 seconds for 1
        GB).

        Raises:
            OSError: the source does not exist, or it cannot be renamed.
        """
        # Holding the overwritten file open delays the freeing of its blocks until the background thread closes it.
        old = target.open("rb") if target.exists() else None
        os.replace(source, target)
        if old is not None:
            self._in_background(old.close)

    def teardown(self) -> None:
        """Wait for the write in the background, end its thread and free the host memory."""
        try:
            self.wait()
        finally:
            self._host, self._kinds = [], []
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None

    def _in_background(self, function: Callable[..., None], *args: object) -> Future[None]:
        """Queue a function for the background thread, which calls functions one after another."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        return self._thread.submit(function, *args)

    def _copy(self, checkpoint: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Copy a checkpoint's tensors to host memory. The memory of the previous checkpoint's copy is reused if that
        has the same shapes and dtypes, so that checkpoint must have been written to disk."""
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
        """Load a checkpoint, which may hold only tensors and Python's built-in types. If ``last.ckpt`` is damaged,
        ``previous.ckpt`` is loaded.

        Raises:
            ValueError: the file is damaged, and there is no undamaged ``previous.ckpt``; the message names every
                damaged file.
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
            # In files whose names start with a dot, which are no checkpoints, Lightning passes weights between
            # processes.
            if not path.name.startswith("."):
                checkpoint_file.check_contents(found)
            return found
        except (FileNotFoundError, PermissionError):
            raise
        except (Damaged, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"the checkpoint {path} is damaged or not one of this program ({said}); give "
                "another one by --ckpt_path (last, best or a .ckpt file of a run), or start anew with another --run_dir"
            ) from error


def _tensors(checkpoint: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    apply_to_collection(checkpoint, Tensor, lambda tensor: found.append(tensor.detach()))
    return found


def _host_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Allocate host memory for copies of tensors, pinned for GPU tensors, so that the copies are asynchronous.

    Memory is allocated in blocks of at least ``BLOCK`` bytes, because allocating pinned memory takes milliseconds, and
    a 7B's adapter and its optimizer have over a thousand tensors. Each tensor nevertheless has a storage of its own:
    torch writes whole storages to a file.
    """
    found, blocks = [], {}
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
        found.append(memory.view(tensor.shape))
    return found


def run_identity(*, base: str, lora: LoraSettings, seed: int) -> dict[str, Any]:
    """Return the identity of a run, which its checkpoints must have: digest of the base model, adapter settings and
    seed; the adapter with which it started, if any, by a digest of its tensors."""
    settings = asdict(lora)
    del settings["start"]
    if lora.start is not None:
        settings["start"] = digest(lora.starts_at.tensors)
    settings["targets"] = sorted(settings["targets"])
    return {"base": base_digest(base), "seed": seed, **{f"lora.{name}": value for name, value in settings.items()}}


def lora_settings(identity: Mapping[str, Any]) -> LoraSettings:
    """Extract the adapter's settings from a run's identity, as returned by ``run_identity``."""
    found = {name.removeprefix("lora."): value for name, value in identity.items() if name.startswith("lora.")}
    found.pop("start", None)  # a digest; the checkpoint holds the adapter
    return LoraSettings(**{**found, "targets": tuple(found["targets"])})


def adapter_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the adapter's tensors that are stored in a checkpoint.

    Raises:
        ValueError: one is no fp32 tensor, or an adapted linear lacks A [r, K] or B [N, r] of the run's rank r.
    """
    found, rank = checkpoint.get("state_dict"), identity_of(checkpoint).get("lora.rank")
    if not isinstance(found, dict) or not found:
        raise ValueError("the checkpoint holds no adapter: it was not written by a run of this program")
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"the checkpoint's adapter tensor {name} is of {kind}; expected torch.float32")
        linear, lora, matrix = name.partition(".lora_")
        if not lora:
            continue
        other = f"{linear}.lora_{'B' if matrix == 'A.weight' else 'A'}.weight"
        if matrix not in ("A.weight", "B.weight") or other not in found:
            raise ValueError(f"the checkpoint's adapter has {name} and not {other}")
        if tensor.ndim != 2 or tensor.shape[0 if matrix == "A.weight" else 1] != rank:
            raise ValueError(f"the checkpoint's adapter tensor {name} is {list(tensor.shape)}; expected rank {rank}")
    return found


def check_training_state(checkpoint: Mapping[str, Any], *, max_steps: int) -> None:
    """Refuse to resume from a checkpoint without the state of training, or that has done more steps than the run has.

    Raises:
        ValueError: a part of the state is missing or of another type, or ``max_steps`` is below the steps done.
    """
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
    """Return the identity (base, adapter settings, seed) that is stored in a checkpoint.

    Raises:
        ValueError: the checkpoint has no identity.
    """
    found = checkpoint.get("identity")
    if not isinstance(found, Mapping) or "base" not in found:
        raise ValueError("the checkpoint does not say of which base it is: it was not written by a run of this program")
    return found


def check_identity(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to resume a run with settings that differ from those that it was started with.

    Raises:
        ValueError: a setting differs; the message lists each such setting with its value in the checkpoint and its
            value now.
    """
    differences = [
        f"{'seed_everything' if name == 'seed' else f'model.{name}'}: the run has {json.dumps(saved.get(name))}, "
        f"this start has {json.dumps(value)}{OTHER_BASE if name == 'base' else ''}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differences:
        raise ValueError(
            "this checkpoint is of another run; start in a new --run_dir or set back:\n  " + "\n  ".join(differences)
        )
