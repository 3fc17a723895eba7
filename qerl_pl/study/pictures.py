"""Draw a study's pictures: curves with their spread over seeds, and the differences between arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qerl_pl.common.files import replacing
from qerl_pl.study.analysis import Group, compared
from qerl_pl.study.study_file import Study


def draw(study: Study, groups: Sequence[Group], folder: Path) -> list[Path]:
    """Write the pictures; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = {
        "curves.png": _curves(plt, study, groups),
        "differences.png": _differences(plt, study, groups),
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
