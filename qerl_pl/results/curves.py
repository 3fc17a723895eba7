"""Read the logged scalars of a run from its TensorBoard event files, and summarise them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from qerl_pl.results.event_files import Scalar, read_scalars

SURPRISAL = "rollout/surprisal"
"""Name of the entropy of the sampling distribution, noise and temperature included."""


class Curve(NamedTuple):
    """One scalar as a function of the rollout's index."""

    steps: list[int]
    values: list[float]
    times: list[float]
    """Wall-clock time at which each value of the curve was logged, in seconds since the epoch."""


def read_curves(run: Path) -> dict[str, Curve]:
    """Read all scalars of a run. If a resumed run logged a step a second time, the later value is taken.

    Unreadable parts of a damaged or truncated event file are skipped, with a warning on stderr.

    Raises:
        ValueError: the folder holds no event file, or none with a readable scalar.
    """
    files = sorted(run.glob("events.out.tfevents.*"))
    if not files:
        raise ValueError(_without_events(run))
    scalars: list[Scalar] = []
    for path in files:
        found, lost = read_scalars(path)
        if lost:
            print(f"warning: {path} is damaged or cut off: {lost} bytes of it are left out", file=sys.stderr)
        scalars += found
    if not scalars:
        raise ValueError(f"the event files of {run} hold no scalars: the run logged none, or they are damaged")
    latest: dict[str, dict[int, Scalar]] = {}
    for scalar in sorted(scalars, key=lambda scalar: scalar.time):
        latest.setdefault(scalar.tag, {})[scalar.step] = scalar
    return {tag: _curve([by_step[step] for step in sorted(by_step)]) for tag, by_step in latest.items()}


def _without_events(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}; give the folder of a run, such as runs/quickstart"
    runs = sorted({str(path.parent) for path in folder.glob("*/events.out.tfevents.*")})
    if runs:
        return f"{folder} is no run but has runs in it; give one or several of them: {', '.join(runs)[:200]}"
    return f"{folder} holds no TensorBoard event files, which a run writes once it trains"


def _curve(scalars: list[Scalar]) -> Curve:
    return Curve([one.step for one in scalars], [one.value for one in scalars], [one.time for one in scalars])


def summarize(curves: dict[str, Curve]) -> dict[str, float]:
    """Summarise a run in numbers: accuracy, reward, entropy, speed and sampler-trainer gap, where they were logged."""
    found: dict[str, float] = {}

    def ends(name: str, tag: str, window: int = 1) -> None:
        if tag in curves:
            values = curves[tag].values
            found[f"{name}, first"] = sum(values[:window]) / len(values[:window])
            found[f"{name}, last"] = sum(values[-window:]) / len(values[-window:])

    ends("accuracy (held out)", "val/accuracy")
    ends("reward (held out)", "val/reward")
    ends("reward (rollouts, mean of 5)", "train/reward", window=5)
    ends("entropy (nats per token, mean of 5)", "policy/entropy", window=5)
    if "throughput/rollout_tokens_per_s" in curves:
        values = sorted(curves["throughput/rollout_tokens_per_s"].values)
        found["rollout tokens/s (median)"] = values[len(values) // 2]
    if "time/step_s" in curves:
        found["seconds in RL steps"] = sum(curves["time/step_s"].values)
        found["RL steps"] = float(len(curves["time/step_s"].values))
    for statistic in ("mean_abs", "max"):
        if f"gap/{statistic}" in curves:
            gap = curves[f"gap/{statistic}"]
            quiet = [v for s, v in zip(gap.steps, gap.values, strict=True) if _at(curves.get("aqn/sigma"), s) == 0]
            found[f"logprob gap {statistic}, without noise (nats)"] = max(quiet, default=float("nan"))
            found[f"logprob gap {statistic}, whole run (nats)"] = max(gap.values)
    return found


def _at(curve: Curve | None, step: int) -> float:
    """Return the value of a curve at a step, or 0 if none was logged there."""
    return dict(zip(curve.steps, curve.values, strict=True)).get(step, 0.0) if curve else 0.0
