"""Record values that a run does not log itself, and compute how far the gap between trainer and engine jumps above that
of earlier rollouts."""

import math
import time
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback

from callbacks.rollout_evidence import RolloutEvidence
from qerl_pl.policy.jumps import jump
from qerl_pl.results.curves import Curve
from qerl_pl.rollout import gaps

START, VALIDATION, HOST = "bench/start_s", "bench/validation_s", "bench/host_bytes"


class RunClock(Callback):
    """Logs three curves over the number of finished rollouts: ``bench/start_s``, the seconds from the start of the
    process to the first validation or rollout; ``bench/validation_s``, the seconds of each validation; and
    ``bench/host_bytes``, the host memory of the process after each training step."""

    def __init__(self) -> None:
        self._started = False
        self._began = 0.0

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._start(trainer, pl_module)
        self._began = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        _log(trainer, pl_module, VALIDATION, time.perf_counter() - self._began)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
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


def jumps(curves: Mapping[str, Curve], name: str, dtype: torch.dtype) -> list[float]:
    """Compare the gap of each rollout (the difference between trainer and engine, the curve ``evidence/NAME``) with the
    gaps of earlier rollouts, as ``RolloutEvidence`` does. Returns three maxima over the rollouts: the ratio to the
    earlier median, the distance from it in robust standard deviations, and the smaller of these two as shares of their
    limits. The list is empty if the run logged no such curve."""
    if f"evidence/{name}" not in curves:
        return []
    guard, curve, sigma = RolloutEvidence().limits, curves[f"evidence/{name}"], curves.get("aqn/sigma")
    noisy = {step for step, value in zip(sigma.steps, sigma.values, strict=True) if value > 0} if sigma else set()
    values = [
        value
        for step, value in zip(curve.steps, curve.values, strict=True)
        if not (name.endswith("_of_all") and step in noisy)
    ]
    kind = name.removesuffix("_of_all")
    floor, limit = (
        gaps.GAP_FLOOR[dtype] * gaps.FLOORS[kind],
        (guard.max_jump or math.inf) * gaps.JUMPS[kind],
    )
    compared = [jump(value, values[max(0, at - guard.window) : at], floor=floor) for at, value in enumerate(values)]
    rows = [(ratio, sigmas, min(ratio / limit, sigmas / gaps.SURE_SIGMAS)) for ratio, sigmas in compared]
    return [max(column) for column in zip(*rows, strict=True)]
