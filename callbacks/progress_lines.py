"""How far a run is, where nobody sees a bar."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, Trainer
from typing_extensions import override

from qerl_pl.module import QeRLModule


class ProgressLines(Callback):
    """Prints a line a rollout where the output is no terminal: to the log of a job, or a file.

    The reward is the mean of the first rank's rows. The time that is left is by the mean of this start's rollouts,
    validations and all.

    Args:
        every: rollouts between two lines. The last of a run has one.

    Raises:
        ValueError: ``every`` is less than 1.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.progress_lines.ProgressLines
              init_args: {every: 10}
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected at least 1 rollout")
        self.every = every
        self._first, self._start = 0, 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        self._first, self._start = pl_module.rollout_index, time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done, total = outputs["rollout_index"] + 1, pl_module.num_rollouts
        if not trainer.is_global_zero or sys.stdout.isatty() or (done % self.every and done < total):
            return
        each = (time.perf_counter() - self._start) / (done - self._first)
        left = timedelta(seconds=round(each * (total - done)))
        reward = outputs["rollout"].evaluation.table.total.mean().item()
        seconds = sum(outputs["seconds"].values())
        print(f"rollout {done} of {total}: reward {reward:.3f}, {seconds:.1f} s, {left} left", flush=True)
