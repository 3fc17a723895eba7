"""Ctrl-C: finish the step, write a checkpoint, exit."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info


class GracefulStop(Callback):
    """The first Ctrl-C ends the run, checkpoint included, after the running RL iteration; the second one at once."""

    def __init__(self) -> None:
        self._asked = False
        self._previous: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._asked = False
        self._previous = signal.signal(signal.SIGINT, self._handle)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.strategy.reduce_boolean_decision(self._asked, all=False):
            trainer.should_stop = True  # LastCheckpoint sees it and saves
            rank_zero_info(f"stopped after step {trainer.global_step}; go on with --ckpt_path last")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        print("\nCtrl-C: this step ends first, then a checkpoint is written (again: stop at once)", flush=True)
