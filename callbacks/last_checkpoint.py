"""Write the checkpoint that ``--ckpt_path last`` resumes from."""

import copy
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from typing_extensions import override

from callbacks.best_checkpoint import BestCheckpoint
from qerl_pl.checkpoint import SafeCheckpointIO
from qerl_pl.common.checks import require_at_least
from qerl_pl.common.run_folder import LAST, PREVIOUS

PENDING = "pending.ckpt"


class LastCheckpoint(ModelCheckpoint):
    """Keeps the newest complete checkpoint, ``last.ckpt``, and the one before it, ``previous.ckpt``.

    A checkpoint is written at the end of a step (one RL iteration) and renamed to ``last.ckpt`` when the next step
    begins. By then the step's scalars are on disk and its validation is over; if the validation has changed the state
    of a callback, such as EarlyStopping's count, the checkpoint is written again. A killed run therefore resumes from a
    step whose results are complete, and repeats the steps after it.

    A large checkpoint is written in the background, and renamed at the beginning or end of a later step. Steps that end
    while it is being written are not saved, so that training does not wait for the disk. After a killed run, resuming
    repeats at most two steps more than fit into the time of two writes. After a run that failed with an error, it
    repeats at most half as many, because the failing run waits for the write in progress. Training waits for the disk
    only if a checkpoint is written again after a validation.

    Args:
        every_n_rollouts: RL iterations from one checkpoint to the next, if the disk keeps up. The last iteration is
            always saved.
        background_bytes: a checkpoint whose tensors take at least this many bytes is written in the background, from a
            copy in host memory that is kept until the run ends.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.last_checkpoint.LastCheckpoint
              init_args: {every_n_rollouts: 5}
    """

    def __init__(self, every_n_rollouts: int = 1, background_bytes: int = 2**26) -> None:
        require_at_least(1, every_n_rollouts=every_n_rollouts)
        require_at_least(0, background_bytes=background_bytes)
        # with save_top_k=0, Lightning's ModelCheckpoint saves nothing, and only resolves the folder and finds last.ckpt
        super().__init__(save_top_k=0)
        self.every_n_rollouts, self.background_bytes = every_n_rollouts, background_bytes
        self._pending = False
        self._step_is_over = False  # whether scalars of the saved step are on disk; then its file may be renamed
        self._is_left_out = False  # whether the most recent step was not saved
        self._saved_states: dict[str, Any] | None = None  # states of all callbacks at the last save

    @property
    @override
    def state_key(self) -> str:
        return type(self).__qualname__

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # The states of all callbacks are saved, so they have to be those after the step or the validation.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda callback: callback is self)  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        done = outputs["rollout_index"] + 1
        finished = trainer.should_stop or trainer.global_step >= trainer.max_steps
        self._is_left_out = not finished and (done % self.every_n_rollouts > 0 or _is_writing(trainer))
        if not self._is_left_out:
            self._save(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._step_is_over = True
        writer = _writer(trainer)
        if writer is None or writer.is_written():
            self._commit(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_left_out:
            if trainer.should_stop:  # the validation after the step has stopped the run
                self._save(trainer)
        elif self._saved_states is not None:  # None before the first step
            changed = not are_equal(_states(trainer), self._saved_states)
            if trainer.strategy.reduce_boolean_decision(changed, all=False):
                if writer := _writer(trainer):
                    writer.wait()
                self._write(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._commit(trainer)
        # If a signal has ended the run, the exit status of its ranks is not 0. srun and torchrun end all ranks when one
        # of them has ended so, and rank 0 may still be writing.
        trainer.strategy.barrier("last checkpoint")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._step_is_over:
            self._commit(trainer)

    def _path(self, name: str) -> Path:
        assert self.dirpath is not None, "resolved in setup"
        return Path(self.dirpath) / name

    def _save(self, trainer: Trainer) -> None:
        self._commit(trainer)
        self._step_is_over = False
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        pending = self._path(PENDING)
        if trainer.is_global_zero:
            pending.unlink(missing_ok=True)  # left by a killed run
        options = {"background_bytes": self.background_bytes} if _writer(trainer) else None
        trainer.save_checkpoint(pending, weights_only=False, storage_options=options)
        self._pending = True
        self._saved_states = copy.deepcopy(_states(trainer))

    def _commit(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or not self._pending:
            return
        pending, last, writer = self._path(PENDING), self._path(LAST), _writer(trainer)
        if writer:
            writer.wait()
        self._pending = False
        if writer and not pending.exists():
            return  # writing failed, and an earlier wait for it has already raised the error
        for logger in trainer.loggers:
            logger.save()
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()
        if last.exists() and not (writer and writer.damaged and writer.damaged.samefile(last)):
            # last.ckpt is hard-linked as previous.ckpt before it is replaced, so that one of the names always exists
            link = self._path(PREVIOUS + ".tmp")
            link.unlink(missing_ok=True)
            _link(last, link)
            (writer.replace if writer else os.replace)(link, self._path(PREVIOUS))
        os.replace(pending, last)
        if writer:
            writer.damaged = None


def are_equal(first: Any, second: Any) -> bool:
    """Compare, by types and values, states of callbacks: nested dicts and lists of tensors and plain values."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(are_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(are_equal, first, second))
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return bool(np.all(first == second))


def _states(trainer: Trainer) -> dict[str, Any]:
    """Return the states of all callbacks by their key, without that of BestCheckpoint, which changes in almost every
    validation, and which a resumed run reads from best.ckpt."""
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return {one.state_key: one.state_dict() for one in callbacks if not isinstance(one, BestCheckpoint)}


def _link(path: Path, link: Path) -> None:
    """Give the file ``path`` the second name ``link``; copy it on file systems without hard links, such as exFAT."""
    try:
        os.link(path, link)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        shutil.copyfile(path, link)


def _writer(trainer: Trainer) -> SafeCheckpointIO | None:
    """Return the trainer's checkpoint plug-in if it can write in the background, else None."""
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, SafeCheckpointIO) else None


def _is_writing(trainer: Trainer) -> bool:
    """Return, on every rank, whether rank 0 is still writing the previous checkpoint. Every rank must call this."""
    writer = _writer(trainer)
    return writer is not None and trainer.strategy.broadcast(not writer.is_written())
