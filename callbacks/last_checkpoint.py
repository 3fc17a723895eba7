"""The checkpoint that ``--ckpt_path last`` goes on from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from qerl_pl.checkpoint import LAST, PREVIOUS, SafeCheckpointIO

PENDING = "pending.ckpt"


class LastCheckpoint(ModelCheckpoint):
    """Keeps ``last.ckpt`` and the one before it, ``previous.ckpt``.

    A checkpoint is written at the end of a step and gets its name when the next step begins: by then the step's scalars
    are on disk and a validation that was due is over. A run that is killed anywhere goes on from a step of which
    everything was kept, and does what came after it again.

    A large checkpoint is written while training goes on, and gets its name at the beginning or end of a step after
    that. Steps that end in the meantime have none, so that training does not wait for the disk: a run that is killed
    does again what it did in the time of two writes and two steps at the most, and one that fails half of that.

    Args:
        every_n_rollouts: RL iterations between two checkpoints, where the disk keeps up. The last iteration is always
            kept.
        background_bytes: of the adapter and its optimizer: so many or more are written while training goes on, from a
            copy in the host's memory, which is kept until the run ends.

    Raises:
        ValueError: ``every_n_rollouts`` is less than 1, or ``background_bytes`` is negative.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.last_checkpoint.LastCheckpoint
              init_args: {every_n_rollouts: 5}
    """

    def __init__(self, every_n_rollouts: int = 1, background_bytes: int = 2**26) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"every_n_rollouts is {every_n_rollouts}; expected at least 1")
        if background_bytes < 0:
            raise ValueError(f"background_bytes is {background_bytes}; expected 0 or more")
        super().__init__(save_top_k=0)  # the parent saves nothing: it resolves the folder and finds last.ckpt again
        self.every_n_rollouts = every_n_rollouts
        self.background_bytes = background_bytes
        self._pending = False
        self._step_is_over = False  # and on record: the pending checkpoint may get its name
        self._is_left_out = False  # the last step's

    @property
    @override
    def state_key(self) -> str:
        return type(self).__qualname__

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = outputs["rollout_index"] + 1
        finished = trainer.should_stop or trainer.global_step >= trainer.max_steps
        self._is_left_out = not finished and (done % self.every_n_rollouts > 0 or _is_writing(trainer))
        if not self._is_left_out:
            self._save(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step_is_over = True
        writer = _writer(trainer)
        if writer is None or writer.is_written():
            self._commit(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_left_out and trainer.should_stop:  # validation ends the run, which the step could not know
            self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._commit(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._step_is_over:
            self._commit(trainer)

    @property
    def _folder(self) -> Path:
        assert self.dirpath is not None, "resolved in setup"
        return Path(self.dirpath)

    def _save(self, trainer: Trainer) -> None:
        self._commit(trainer)
        self._step_is_over = False
        pending = self._folder / PENDING
        if trainer.is_global_zero:
            pending.unlink(missing_ok=True)  # of a run that was killed
        options = {"background_bytes": self.background_bytes} if _writer(trainer) else None
        trainer.save_checkpoint(pending, weights_only=False, storage_options=options)
        self._pending = True

    def _commit(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or not self._pending:
            return
        writer = _writer(trainer)
        if writer:
            writer.wait()
        self._pending = False
        if writer and not (self._folder / PENDING).exists():
            return  # it could not be written, and another callback that waited for it was told
        for logger in trainer.loggers:
            logger.save()
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()
        last = self._folder / LAST
        if last.exists() and not (writer and writer.damaged and writer.damaged.samefile(last)):
            # A second name for the old file first, so that no moment has neither.
            link = self._folder / (PREVIOUS + ".tmp")
            link.unlink(missing_ok=True)
            os.link(last, link)
            replace = writer.replace if writer else os.replace
            replace(link, self._folder / PREVIOUS)
        os.replace(self._folder / PENDING, last)
        if writer:
            writer.damaged = None


def _writer(trainer: Trainer) -> SafeCheckpointIO | None:
    """What may write in the background; another plugin has written when it returns."""
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, SafeCheckpointIO) else None


def _is_writing(trainer: Trainer) -> bool:
    """Whether the first rank, which writes, is still at it; the same on all ranks."""
    writer = _writer(trainer)
    return writer is not None and trainer.strategy.broadcast(not writer.is_written())
