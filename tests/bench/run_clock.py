"""Note in a run's event files the time of start and validations and the host memory."""

from __future__ import annotations

import time
from typing import Any

import psutil
from lightning.pytorch import Callback

START, VALIDATION, HOST = "bench/start_s", "bench/validation_s", "bench/host_bytes"


class RunClock(Callback):
    """Logs ``bench/start_s``, from the start of the process to the first validation or rollout, and
    ``bench/validation_s`` of each validation, in seconds, and ``bench/host_bytes``, the process's memory after each
    rollout; all by the number of rollouts done.
    """

    def __init__(self) -> None:
        self._started = False
        self._began = 0.0

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._start(trainer, pl_module)
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        _log(trainer, pl_module, VALIDATION, time.perf_counter() - self._began)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        _log(trainer, pl_module, HOST, psutil.Process().memory_info().rss)

    def _start(self, trainer: Any, pl_module: Any) -> None:
        if not self._started:
            _log(trainer, pl_module, START, time.time() - psutil.Process().create_time())
        self._started = True


def _log(trainer: Any, pl_module: Any, name: str, value: float) -> None:
    for logger in trainer.loggers:
        logger.log_metrics({name: value}, step=pl_module.rollout_index)
