"""Report on runs from their TensorBoard event files: a table of results, a picture of curves, and an HTML page."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qerl_pl.common.files import replacing, write_whole
from qerl_pl.common.phases import phase
from qerl_pl.results.curves import Curve, read_curves, summarize
from qerl_pl.tools.options import report_options
from qerl_pl.tools.page.render import page_of

CURVES = {
    "val/accuracy": "accuracy on held-out problems",
    "val/reward": "reward on held-out problems",
    "train/reward": "reward of the rollouts",
    "policy/entropy": "entropy (nats per token)",
    "aqn/sigma": "noise sigma",
    "rollout/completion_tokens": "tokens per completion",
    "gap/mean_abs": "sampler-trainer gap (nats)",
}
"""Names of the scalars that the picture shows if a run logged them, with their titles."""


def main(argv: list[str]) -> int:
    """Parse the command line and report; returns the exit status."""
    options = report_options().parse_args(argv)
    with phase("reading the curves"):
        curves = {run: read_curves(run) for run in options.runs}
    summaries = {run: summarize(of_run) for run, of_run in curves.items()}
    for run, summary in summaries.items():
        if not summary:
            print(f"{run} has no scalars of training; if it is an evaluation, its results are in {run / 'evaluation'}")
    if any(summaries.values()):
        print_table(summaries)
    if options.picture:
        print(draw([(run.name, of_run) for run, of_run in curves.items()], options.picture))
    if options.json:
        lines = [json.dumps({"run": run.name, **summary}) for run, summary in summaries.items()]
        write_whole(options.json, "\n".join(lines) + "\n")
    if options.html:
        with phase("making the page"):
            write_whole(options.html, page_of(curves, limit=options.completions))
        print(f"page: {options.html}")
    return 0


def print_table(summaries: Mapping[Path, Mapping[str, float]]) -> None:
    """Print a table of the runs' summaries (accuracy, reward, speed, ...), one column per run."""
    table = Table("", *(run.name for run in summaries))
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary):
        table.add_row(name, *(f"{summary[name]:.4g}" if name in summary else "-" for summary in summaries.values()))
    Console().print(table)


def draw(runs: Sequence[tuple[str, Mapping[str, Curve]]], picture: Path, titles: Mapping[str, str] = CURVES) -> str:
    """Draw curves of runs into a picture file, with one panel per scalar of ``titles`` that at least one run logged,
    and one line per run. Returns a line for the user that names the file, or says that there was nothing to draw."""
    panels = {tag: title for tag, title in titles.items() if any(tag in of_run for _, of_run in runs)}
    if not panels:
        return f"no picture: no run logged any of {', '.join(titles)}"
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = math.ceil(len(panels) / 2)
    figure, grid = plt.subplots(2, columns, figsize=(4 * columns, 6), constrained_layout=True, squeeze=False)
    axes = grid.flat[: len(panels)]
    for unused in grid.flat[len(panels) :]:
        unused.set_axis_off()
    for axis, (tag, title) in zip(axes, panels.items(), strict=True):
        for name, of_run in runs:
            if tag in of_run:
                marker = "o" if len(of_run[tag].steps) < 30 else None
                axis.plot(of_run[tag].steps, of_run[tag].values, label=name, marker=marker, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("rollout")
        axis.grid(alpha=0.3)
        if tag.startswith("gap"):
            axis.set_yscale("log")
    if len(runs) > 1:
        axes[0].legend(fontsize=8)
    with replacing(picture) as temporary:
        figure.savefig(temporary, dpi=120, format=picture.suffix[1:].lower())
    plt.close(figure)
    return f"curves: {picture}"
