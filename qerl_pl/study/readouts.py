"""Compute the readouts of a run (numbers that summarise it, such as the final accuracy) from its event files."""

from collections.abc import Sequence

import numpy as np

from qerl_pl.results.curves import SURPRISAL, Curve, read_curves
from qerl_pl.study import state
from qerl_pl.study.study_file import FIT, Run, Study

WINDOW = 5  # number of rollouts over which a running mean is taken
Curves = dict[str, Curve]


def readouts(study: Study, run: Run, curves: Curves) -> dict[str, float]:
    """Compute the readouts of a run (numbers that summarise it), by name. A readout is left out if the run did not log
    the scalars that it needs. The readout "area under ..." is the mean of a curve over the optimizer steps of training.
    "entropy at equal reward" depends on other runs too, and is added by ``analysis.gather``."""
    validation = study.analysis.validation
    ledger = [tag for tag in sorted(curves) if tag.startswith("ledger/") and tag.endswith("/mean_abs")]
    of_curves = [
        ("accuracy at step 0", validation, lambda curve: curve.values[0]),
        ("final accuracy", validation, lambda curve: curve.values[-1]),
        ("area under accuracy", validation, area),
        ("final reward", "train/reward", lambda curve: average(curve, len(curve.values) // 10)),
        ("area under reward", "train/reward", area),
        ("entropy at step 0", "policy/entropy", lambda curve: curve.values[0]),
        ("mean sampling entropy", SURPRISAL, average),
        ("gap", "gap/mean_abs", average),
        *((f"gap, {tag.split('/')[1]}", tag, average) for tag in ledger),
        ("seconds per step", "time/step_s", lambda curve: float(np.median(curve.values))),
        ("GPU memory, GiB", "memory/gpu_peak_bytes", lambda curve: max(curve.values) / 2**30),
    ]
    values = {name: summary(curves[tag]) for name, tag, summary in of_curves if tag in curves}
    if (seconds := state.state_of(run.folder).done.get(FIT)) is not None:
        values["seconds of the run"] = seconds
    for name in study.evaluations:
        values |= {f"{name}: pass@{k}": share for k, share in pass_at_k(run, name).items()}
    return values


def pass_at_k(run: Run, evaluation: str) -> dict[int, float]:
    """Read the pass@k of one evaluation of a run from its event files; returns a dict from k to the share of solved
    problems, empty if the evaluation has not been run. If the evaluation was repeated with other settings, and so has
    several folders, the newest counts."""
    files = (run.folder / "evaluations" / evaluation).rglob("events.out.tfevents.*")
    newest_first = sorted(files, key=lambda path: path.name, reverse=True)  # the names begin with the time
    for folder in dict.fromkeys(path.parent for path in newest_first):
        last = {tag: curve.values[-1] for tag, curve in read_curves(folder).items()}
        shares = {int(tag.removeprefix("test/pass@")): last[tag] for tag in last if tag.startswith("test/pass@")}
        if "test/accuracy" in last:
            shares[1] = last["test/accuracy"]
        if shares:
            return dict(sorted(shares.items()))
    return {}


def average(curve: Curve, last: int | None = None) -> float:
    """Compute the mean of a curve's values; with ``last``, of that many last values, but at least one."""
    return float(np.mean(curve.values if last is None else curve.values[-max(1, last) :]))


def area(curve: Curve) -> float:
    """Compute the mean of a curve over its steps: the area under it by the trapezoidal rule, divided by the distance of
    the last step from the first."""
    if len(curve.steps) == 1:
        return curve.values[0]
    return float(np.trapezoid(curve.values, curve.steps) / (curve.steps[-1] - curve.steps[0]))


def smooth(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Compute the running mean of N values, [N]: each result is the mean of a value and of up to ``window - 1`` values
    before it."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def equal_reward(runs: Sequence[Curves]) -> float | None:
    """Return the highest running mean of the training reward that every run reached; None if a run logged no reward."""
    if not runs or any("train/reward" not in curves for curves in runs):
        return None
    means = [smooth(curves["train/reward"].values) for curves in runs]
    if not all(np.isfinite(values).any() for values in means):
        return None
    return min(float(values[np.isfinite(values)].max()) for values in means)


def entropy_at(curves: Curves, reward: float) -> float | None:
    """Return the entropy of a run, in nats per token, at the first step at which its reward reaches ``reward``; entropy
    and reward are running means. Returns None if the run never reaches this reward, or logged no entropy."""
    if not {"train/reward", "policy/entropy"} <= curves.keys():
        return None
    reached = np.flatnonzero(smooth(curves["train/reward"].values) >= reward)
    if not len(reached):
        return None
    entropy = curves["policy/entropy"]
    by_step = dict(zip(entropy.steps, smooth(entropy.values).tolist(), strict=True))
    return by_step.get(curves["train/reward"].steps[int(reached[0])])
