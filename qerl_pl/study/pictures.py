"""Draw a study's pictures: curves with their spread over seeds, pass@k, and the differences between arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_pl.common.files import replacing
from qerl_pl.study.analysis import Group, compared
from qerl_pl.study.statistics import interquartile_mean
from qerl_pl.study.study_file import Study


def draw(study: Study, groups: Sequence[Group], folder: Path) -> list[Path]:
    """Write the pictures; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = {
        "curves.png": _curves(plt, study, groups),
        "entropy_by_reward.png": _entropy_by_reward(plt, groups),
        "differences.png": _differences(plt, study, groups),
        "pass_at_k.png": _pass_at_k(plt, study, groups) if study.evaluations else None,
    }
    found = []
    for name, figure in figures.items():
        if figure is not None:
            with replacing(folder / name) as temporary:
                figure.savefig(temporary, dpi=120, format="png")
            plt.close(figure)
            found.append(folder / name)
    return found


def _curves(plt: Any, study: Study, groups: Sequence[Group]) -> Any:
    """Plot reward, accuracy, entropy and gap by rollout: means over seeds, shaded from the lower to the upper
    quartile."""
    tags = {
        "train/reward": "reward of the rollouts",
        study.analysis.validation: "accuracy on held-out problems",
        "policy/entropy": "entropy (nats per token)",
        "gap/mean_abs": "sampler-trainer gap (nats)",
    }
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for axis, (tag, title) in zip(axes.flat, tags.items(), strict=True):
        for group in groups:
            steps, values = _together(group, tag)
            if len(steps):
                [line] = axis.plot(steps, values.mean(axis=0), label=group.name)
                low, high = np.quantile(values, [0.25, 0.75], axis=0)
                axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("rollout")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    return figure


def _together(group: Group, tag: str) -> tuple[list[int], np.ndarray]:
    """Return the steps at which every run of a group logged the scalar ``tag``, and the values [runs, steps]."""
    runs = [dict(zip(c[tag].steps, c[tag].values, strict=True)) for c in group.curves.values() if tag in c]
    steps = sorted(set.intersection(*(set(run) for run in runs))) if runs else []
    return steps, np.array([[run[step] for step in steps] for run in runs])


def _entropy_by_reward(plt: Any, groups: Sequence[Group]) -> Any:
    """Plot entropy against reward, both means over an arm's seeds, one point per step."""
    figure, axis = plt.subplots(figsize=(6, 4.5), constrained_layout=True)
    for group in groups:
        (steps, reward), (others, entropy) = _together(group, "train/reward"), _together(group, "policy/entropy")
        both = sorted(set(steps) & set(others))
        if both:
            at = [reward.mean(axis=0)[steps.index(step)] for step in both]
            axis.plot(at, [entropy.mean(axis=0)[others.index(step)] for step in both], ".-", label=group.name)
    axis.set(xlabel="reward of the rollouts", ylabel="entropy (nats per token)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def _differences(plt: Any, study: Study, groups: Sequence[Group]) -> Any:
    """Plot the differences of arms in the readout that decides the study, with 95 % intervals; None if no pair of arms
    has finished runs."""
    found = compared(study, groups, study.analysis.metric)
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(8, 1 + 0.4 * len(found)), constrained_layout=True)
    for row, each in enumerate(found):
        value, low, high, _ = each.comparison.difference
        axis.plot([low, high], [row, row], color="tab:blue")
        axis.plot([value], [row], "o", color="tab:blue")
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(found)), [f"{each.one.name} - {each.other.name}" for each in found])
    axis.invert_yaxis()
    axis.set_xlabel(f"difference in {study.analysis.metric}, 95 % interval")
    axis.grid(alpha=0.3, axis="x")
    return figure


def _pass_at_k(plt: Any, study: Study, groups: Sequence[Group]) -> Any:
    """Plot pass@k by k: interquartile means over seeds with 95 % intervals, one line per arm, one panel per
    evaluation."""
    figure, axes = plt.subplots(
        1, len(study.evaluations), figsize=(5.5 * len(study.evaluations), 4), constrained_layout=True, squeeze=False
    )
    for axis, name in zip(axes.flat, study.evaluations, strict=True):
        start = f"{name}: pass@"
        for group in groups:
            ks = sorted(
                {int(key.removeprefix(start)) for run in group.runs.values() for key in run if key.startswith(start)}
            )
            found = [interquartile_mean(group.strata(f"{start}{k}")) for k in ks]
            if ks:
                [line] = axis.plot(ks, [each.value for each in found], "o-", markersize=3, label=group.name)
                lows, highs = [each.low for each in found], [each.high for each in found]
                axis.fill_between(ks, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set(title=name, xlabel="k", ylabel="pass@k")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    return figure
