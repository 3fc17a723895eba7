"""Callbacks that note what a run's curves do not have, and readings that follow from several curves."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import psutil
import torch
from lightning.pytorch import Callback

from callbacks import rollout_evidence as evidence
from callbacks.canary import TOLERANCE
from qerl_pl.memory.device import used_bytes
from qerl_pl.memory.parts import kv_token_bytes
from qerl_pl.memory.plan import PASSES, TRAINING
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.policy.jumps import change, jump
from qerl_pl.results.curves import Curve
from qerl_pl.rollout.comparison import MARGIN
from qerl_pl.rollout.loop import Rollout
from tests.bench.harness import GIB

START, VALIDATION, HOST = "bench/start_s", "bench/validation_s", "bench/host_bytes"


class RunClock(Callback):
    """Logs, by the number of rollouts done, ``bench/start_s``, from the start of the process to the first validation or
    rollout, ``bench/validation_s`` of each validation, and ``bench/host_bytes``, the process's memory after each
    rollout."""

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


class Readings(Callback):
    """Notes what ``bench_real_checks`` reads besides curves."""

    kv_cache_bytes: ClassVar[int | None] = None
    noted: ClassVar[dict[str, list[float]]] = defaultdict(list)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        Readings.noted.clear()
        plan = pl_module.memory_plan
        Readings.kv_cache_bytes = None if plan is None else plan.kv_cache_bytes
        self._before: dict[str, list[float]] = {}
        self._pass_tokens: list[int] = []
        pl_module.policy.causal_lm.get_input_embeddings().register_forward_hook(self._after_embedding)
        pl_module.loop.observers.append(partial(self._after_rollout, pl_module))
        if pl_module.device.type == "cuda":
            outside = used_bytes(pl_module.device) - torch.cuda.memory_reserved()
            Readings.noted["context_gib"].append(outside / GIB)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        Readings.noted["pass_tokens"].append(float(sum(self._pass_tokens)))
        Readings.noted["passes"].append(float(len(self._pass_tokens)))
        Readings.noted["train_s"].append(outputs["seconds"]["train"])
        plan = pl_module.memory_plan
        if plan is not None:
            total = torch.cuda.get_device_properties(pl_module.device).total_memory
            used = used_bytes(pl_module.device)
            Readings.noted["over_plan_share"].append((used - plan.train) / total)
            unused = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
            passes = max(sum(plan.parts.get(part, {}).get(moment, 0) for part in PASSES) for moment in TRAINING)
            Readings.noted["unused_share"].append(unused / passes)

    def _after_embedding(self, _module: Any, arguments: tuple[torch.Tensor, ...], _output: Any) -> None:
        if torch.is_grad_enabled():
            self._pass_tokens.append(arguments[0].numel())

    def _after_rollout(self, pl_module: Any, rollout: Rollout) -> None:
        now = rollout.sampled.group_numbers()
        for name, values in now.items():
            if self._before.get(name) and values:
                # the same comparison as RolloutEvidence's, which warns
                chance = change(values, self._before[name])
                Readings.noted["change_evidence"].append(-math.log(max(chance, 1e-300)))
        self._before, self._pass_tokens = now, []
        plan = pl_module.memory_plan
        if plan is None:
            return
        used = used_bytes(pl_module.device)
        total = torch.cuda.get_device_properties(pl_module.device).total_memory
        Readings.noted["over_plan_share"].append((used - plan.total("rollout")) / total)
        layers = pl_module.policy.num_layers
        graphs = (used - torch.cuda.memory_reserved()) / GIB - Readings.noted["context_gib"][0]
        Readings.noted["graphs_per_layer_mib"].append(1024 * graphs / layers)
        if plan.kv_cache_bytes:
            shape = checkpoint_shape(pl_module.settings.folder, pl_module.settings.compute_dtype)
            engine = plan.run.engine
            of_token = kv_token_bytes(shape, engine.itemsize(plan.run.itemsize), engine.kv_cache_dtype)
            rows = zip(rollout.sampled.prompts, rollout.sampled.completions, strict=True)
            tokens = sum(len(prompt.tokens) + len(row.tokens) for prompt, row in rows)
            Readings.noted["kv_cache_share"].append(tokens * of_token / plan.kv_cache_bytes)


def jumps(curves: Mapping[str, Curve], name: str, dtype: torch.dtype) -> list[float]:
    """Repeat the comparisons of a gap with the rollouts before it, as ``RolloutEvidence`` makes them; returns the
    largest ratio, the largest number of robust standard deviations, and the largest share of the limits of both, of
    which the smaller one of a rollout counts."""
    if f"evidence/{name}" not in curves:
        return []
    guard, curve, sigma = evidence.RolloutEvidence(), curves[f"evidence/{name}"], curves.get("aqn/sigma")
    noisy = {step for step, value in zip(sigma.steps, sigma.values, strict=True) if value > 0} if sigma else set()
    values = [
        value
        for step, value in zip(curve.steps, curve.values, strict=True)
        if not (name.endswith("_of_all") and step in noisy)
    ]
    kind = name.removesuffix("_of_all")
    floor, limit = (
        evidence.GAP_FLOOR[dtype] * evidence.FLOORS[kind],
        (guard.max_jump or math.inf) * evidence.JUMPS[kind],
    )
    compared = [jump(value, values[max(0, at - guard.window) : at], floor=floor) for at, value in enumerate(values)]
    rows = [(ratio, sigmas, min(ratio / limit, sigmas / evidence.SURE_SIGMAS)) for ratio, sigmas in compared]
    return [max(column) for column in zip(*rows, strict=True)]


def canary_share(curves: Mapping[str, Curve], what: str, dtype: torch.dtype) -> list[float]:
    """Return the share of the canary's limits that each comparison of "probe" or "score" reached: of the tolerance and
    of the multiple of rounding errors, the smaller one, because both have to be exceeded."""
    gap, excess = (curves.get(f"canary/{what}_{name}") for name in ("gap", "excess"))
    if gap is None or excess is None:
        return []
    pairs = zip(gap.values, excess.values, strict=True)
    return [min(nats / TOLERANCE[dtype], multiple / MARGIN) for nats, multiple in pairs]


def longest_run(flags: Sequence[bool]) -> int:
    """Return the largest number of consecutive True values."""
    return max((len(list(part)) for flag, part in groupby(flags) if flag), default=0)


def pass_overhead(noted: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Fit seconds = a * tokens + b * passes to the updates of a run, without the first, which compiles.

    Returns:
        b / a, the tokens whose time a pass takes besides that of its own tokens (None where the updates differ too
        little to tell); a; and the median of the relative error.
    """
    tokens, passes, seconds = (
        torch.tensor(noted.get(name, ())[1:], dtype=torch.float64) for name in ("pass_tokens", "passes", "train_s")
    )
    trained = passes > 0
    columns = torch.stack([tokens, passes], dim=1)[trained]
    if len(columns) < 3 or torch.linalg.cond(columns) > 1e6:
        return {"overhead_tokens": None, "s_per_token": None, "error": None}
    fit = torch.linalg.lstsq(columns, seconds[trained].unsqueeze(1)).solution.squeeze(1)
    error = ((columns @ fit - seconds[trained]).abs() / seconds[trained]).median()
    return {"overhead_tokens": (fit[1] / fit[0]).item(), "s_per_token": fit[0].item(), "error": error.item()}
