"""Readings of a run that its curves do not have, or that follow from several of them, for ``bench_real_checks``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback

from callbacks.canary import TOLERANCE
from callbacks.rollout_evidence import FLOORS, GAP_FLOOR, JUMPS, SURE_SIGMAS, RolloutEvidence
from qerl_pl.memory.device import used_bytes
from qerl_pl.memory.parts import kv_token_bytes
from qerl_pl.memory.plan import PASSES, TRAINING
from qerl_pl.memory.shape import checkpoint_shape
from qerl_pl.policy.jumps import change, jump
from qerl_pl.results.curves import Curve
from qerl_pl.rollout.comparison import MARGIN
from qerl_pl.rollout.loop import Rollout

GIB = 2**30


class Readings(Callback):
    """Notes what a run's curves do not have."""

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
        for name, value in {
            "pass_tokens": sum(self._pass_tokens),
            "passes": len(self._pass_tokens),
            "train_s": outputs["seconds"]["train"],
        }.items():
            Readings.noted[name].append(float(value))
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
        graphs = used / GIB - torch.cuda.memory_reserved() / GIB - Readings.noted["context_gib"][0]
        Readings.noted["graphs_per_layer_mib"].append(1024 * graphs / layers)
        if plan.kv_cache_bytes:
            shape = checkpoint_shape(pl_module.settings.folder, pl_module.settings.compute_dtype)
            of_token = kv_token_bytes(
                shape, plan.run.engine.itemsize(plan.run.itemsize), plan.run.engine.kv_cache_dtype
            )
            rows = zip(rollout.sampled.prompts, rollout.sampled.completions, strict=True)
            tokens = sum(len(prompt.tokens) + len(row.tokens) for prompt, row in rows)
            Readings.noted["kv_cache_share"].append(tokens * of_token / plan.kv_cache_bytes)


def jumps(curves: Mapping[str, Curve], name: str, dtype: torch.dtype) -> list[float]:
    """Repeat the comparisons of a gap with the rollouts before it, as ``RolloutEvidence`` makes them; returns the
    largest ratio, the largest number of robust standard deviations, and the largest share of the limits of both, of
    which the smaller one of a rollout counts."""
    if f"evidence/{name}" not in curves:
        return []
    guard, curve, sigma = RolloutEvidence(), curves[f"evidence/{name}"], curves.get("aqn/sigma")
    noisy = {step for step, value in zip(sigma.steps, sigma.values, strict=True) if value > 0} if sigma else set()
    compared = [
        value
        for step, value in zip(curve.steps, curve.values, strict=True)
        if not (name.endswith("_of_all") and step in noisy)
    ]
    kind = name.removesuffix("_of_all")
    floor = GAP_FLOOR[dtype] * FLOORS[kind]
    found = [jump(value, compared[max(0, at - guard.window) : at], floor=floor) for at, value in enumerate(compared)]
    limit = (guard.max_jump or math.inf) * JUMPS[kind]
    shares = [min(each.ratio / limit, each.sigmas / SURE_SIGMAS) for each in found]
    return [max(each.ratio for each in found), max(each.sigmas for each in found), max(shares)] if found else []


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
