"""Draw the curves of runs of pretrained models: accuracy, entropy and length by rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from docs.real_lines import COLOURS, TASK, Line, groups, whole
from qerl_pl.common.files import replacing
from qerl_pl.study.readouts import smooth


def draw(lines: list[Line], file: Path) -> None:
    """Write the picture: a row per model; accuracy, entropy and length by rollout; a colour per arm, and the lines of
    verl's task dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grouped = groups(lines)
    names = list(dict.fromkeys(key[0] for key in grouped))
    panels = {
        "strict": "strict accuracy, test problems",
        "entropy": "entropy, nats per token",
        "completion_tokens": "tokens",
    }
    size = (11, 3.2 * len(names))
    figure, axes = plt.subplots(len(names), len(panels), figsize=size, constrained_layout=True, squeeze=False)
    for (model, task, arm), runs in grouped.items():
        for axis, (name, title) in zip(axes[names.index(model)], panels.items(), strict=True):
            steps, values = _together(whole(runs), name)
            if len(steps):
                style = "--" if task == TASK else "-"
                axis.plot(steps, values.mean(axis=0), style, color=COLOURS.get(arm), label=f"{arm}, {task}")
                low, high = values.min(axis=0), values.max(axis=0)
                axis.fill_between(steps, low, high, color=COLOURS.get(arm), alpha=0.2, linewidth=0)
            axis.set_title(f"{model}: {title}", fontsize=9)
            axis.set_xlabel("rollouts")
            axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=7)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


def _together(runs: list[Line], name: str) -> tuple[Sequence[int], np.ndarray]:
    """Return the rollouts at which every run has a value, and the values [runs, rollouts]."""
    if name == "strict":  # of validations, not of rollouts
        by_step = [{point["rollouts"]: point["strict"] for point in run["validations"]} for run in runs]
    else:
        by_step = [dict(enumerate(smooth(run["curves"].get(name, [])).tolist())) for run in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    return steps, np.array([[run[step] for step in steps] for run in by_step])
