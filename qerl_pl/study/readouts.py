"""Compute the readouts of a run, numbers that summarise it, from its event files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qerl_pl.results.curves import SURPRISAL, Curve, read_curves
from qerl_pl.study import state
from qerl_pl.study.study_file import FIT, Run, Study

WINDOW = 5  # rollouts of a running mean
Curves = dict[str, Curve]


def curves_of(run: Run) -> Curves:
    """Read every scalar that the run's training logged.

    Raises:
        ValueError: there is no event file that can be read.
    """
    return read_curves(run.folder)


def readouts(study: Study, run: Run, curves: Curves) -> dict[str, float]:
    """Compute a run's readouts (numbers that summarise it) by name; one whose scalars were not logged is left out.

    A readout named "area under ..." is the mean of a curve over the steps of training. ``analysis.gather`` adds
    ``entropy at equal reward``, which depends on the other runs.
    """
    found: dict[str, float] = {}
    validation = study.analysis.validation
    if validation in curves:
        values = curves[validation].values
        found |= {"accuracy at step 0": values[0], "final accuracy": values[-1]}
        found["area under accuracy"] = area(curves[validation])
    if "train/reward" in curves:
        values = curves["train/reward"].values
        found["final reward"] = float(np.mean(values[-max(1, len(values) // 10) :]))
        found["area under reward"] = area(curves["train/reward"])
    if "policy/entropy" in curves:
        found["entropy at step 0"] = curves["policy/entropy"].values[0]
    if SURPRISAL in curves:
        found["mean sampling entropy"] = float(np.mean(curves[SURPRISAL].values))
    if "gap/mean_abs" in curves:
        found["gap"] = float(np.mean(curves["gap/mean_abs"].values))
    for tag in sorted(curves):
        if tag.startswith("ledger/") and tag.endswith("/mean_abs"):
            found[f"gap, {tag.split('/')[1]}"] = float(np.mean(curves[tag].values))
    if "time/step_s" in curves:
        found["seconds per step"] = float(np.median(curves["time/step_s"].values))
    if "memory/gpu_peak_bytes" in curves:
        found["GPU memory, GiB"] = max(curves["memory/gpu_peak_bytes"].values) / 2**30
    if (seconds := state.seconds_done(run).get(FIT)) is not None:
        found["seconds of the run"] = seconds
    for name in study.evaluations:
        found |= {f"{name}: pass@{k}": value for k, value in pass_at_k(run, name).items()}
    return found


def pass_at_k(run: Run, evaluation: str) -> dict[int, float]:
    """Read pass@k of a run's evaluation by k; empty if the evaluation has not been run. One completion per problem
    gives k = 1 alone.

    An evaluation that was repeated with other settings has several folders; the one that was written last counts.
    """
    files = (run.folder / "evaluations" / evaluation).rglob("events.out.tfevents.*")
    newest_last = sorted(files, key=lambda path: path.name)  # the names begin with the time
    found: dict[int, float] = {}
    for folder in dict.fromkeys(path.parent for path in reversed(newest_last)):
        curves = read_curves(folder)
        if "test/accuracy" in curves:
            found[1] = curves["test/accuracy"].values[-1]
        for tag, curve in curves.items():
            if tag.startswith("test/pass@"):
                found[int(tag.removeprefix("test/pass@"))] = curve.values[-1]
        if found:
            break
    return dict(sorted(found.items()))


def area(curve: Curve) -> float:
    """Compute the mean of a curve from its first to its last step, by the trapezoidal rule."""
    if len(curve.steps) == 1:
        return curve.values[0]
    return float(np.trapezoid(curve.values, curve.steps) / (curve.steps[-1] - curve.steps[0]))


def smooth(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Compute a running mean of N values: of each value and up to ``window - 1`` values before it, [N]."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def equal_reward(runs: Sequence[Curves]) -> float | None:
    """Return the highest training reward (running mean) that every run reached; None if a run has logged no reward."""
    if not runs or any("train/reward" not in curves for curves in runs):
        return None
    means = [smooth(curves["train/reward"].values) for curves in runs]
    if not all(np.isfinite(each).any() for each in means):
        return None
    return min(float(each[np.isfinite(each)].max()) for each in means)


def entropy_at(curves: Curves, reward: float) -> float | None:
    """Return a run's entropy (running mean, nats per token) at the first step at which the running mean of its reward
    reaches ``reward``.

    None if the reward is never reached, or if no entropy was logged.
    """
    if not {"train/reward", "policy/entropy"} <= curves.keys():
        return None
    reached = np.flatnonzero(smooth(curves["train/reward"].values) >= reward)
    if not len(reached):
        return None
    entropy = curves["policy/entropy"]
    by_step = dict(zip(entropy.steps, smooth(entropy.values).tolist(), strict=True))
    return by_step.get(curves["train/reward"].steps[int(reached[0])])
