"""python -m qerl_pl report: a run's table and curves, from its TensorBoard event files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from qerl_pl.tools.event_files import Scalar, read_scalars
from qerl_pl.tools.output_paths import output_file, picture_file
from qerl_pl.whole import write_whole

CURVES = (
    ("val/accuracy", "accuracy on held-out problems"),
    ("train/reward", "reward of the rollouts"),
    ("policy/entropy", "entropy (nats a token)"),
    ("aqn/sigma", "noise sigma"),
    ("rollout/completion_tokens", "tokens a completion"),
    ("gap/mean_abs", "sampler-trainer gap (nats)"),
)


class Curve(NamedTuple):
    """One scalar over the rollouts of a run."""

    steps: list[int]
    values: list[float]
    times: list[float]
    """When each was logged, in seconds since the epoch."""


def main(argv: list[str]) -> int:
    """Parse the command line and report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m qerl_pl report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders; each becomes a column")
    parser.add_argument(
        "--picture",
        type=picture_file,
        help="draw the curves into this PNG, PDF or SVG file (default: RUN/curves.png for one run)",
    )
    parser.add_argument("--json", type=output_file, help="write the table there, one JSON line a run")
    options = parser.parse_args(argv)
    try:
        curves = {run: read_curves(run) for run in options.runs}
        summaries = {run: summarize(found) for run, found in curves.items()}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(summaries)
    picture = options.picture or (options.runs[0] / "curves.png" if len(options.runs) == 1 else None)
    if picture:
        draw(curves, picture)
        print(f"curves: {picture}")
    if options.json:
        lines = [json.dumps({"run": run.name, **summary}) for run, summary in summaries.items()]
        write_whole(options.json, "\n".join(lines) + "\n")
    return 0


def read_curves(run: Path) -> dict[str, Curve]:
    """Every scalar of a run. Where a resumed run logged a step again, the later value stands.

    What cannot be read of a damaged or cut off event file is left out, and said on stderr.

    Raises:
        ValueError: the folder holds no event file, or none of which anything can be read.
    """
    files = sorted(run.glob("events.out.tfevents.*"))
    if not files:
        raise ValueError(f"{run} holds no TensorBoard event files")
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


def _curve(scalars: list[Scalar]) -> Curve:
    return Curve([one.step for one in scalars], [one.value for one in scalars], [one.time for one in scalars])


def summarize(curves: dict[str, Curve]) -> dict[str, float]:
    """The numbers that tell whether a run learned, and whether it can be trusted; absent where nothing was logged."""
    found: dict[str, float] = {}

    def ends(name: str, tag: str, window: int = 1) -> None:
        if tag in curves:
            values = curves[tag].values
            found[f"{name}, first"] = sum(values[:window]) / len(values[:window])
            found[f"{name}, last"] = sum(values[-window:]) / len(values[-window:])

    ends("accuracy (held out, greedy)", "val/accuracy")
    ends("reward (held out)", "val/reward")
    ends("reward (rollouts, mean of 5)", "train/reward", window=5)
    ends("entropy (nats a token, mean of 5)", "policy/entropy", window=5)
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


def print_table(summaries: dict[Path, dict[str, float]]) -> None:
    """One column a run."""
    table = Table("", *(run.name for run in summaries))
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary):
        table.add_row(name, *(f"{summary[name]:.4g}" if name in summary else "-" for summary in summaries.values()))
    Console().print(table)


def draw(curves: dict[Path, dict[str, Curve]], picture: Path) -> None:
    """One panel a quantity, one line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(12, 6), constrained_layout=True)
    for axis, (tag, title) in zip(axes.flat, CURVES, strict=True):
        for run, found in curves.items():
            if tag in found:
                marker = "o" if len(found[tag].steps) < 30 else None
                axis.plot(found[tag].steps, found[tag].values, label=run.name, marker=marker, markersize=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("rollout")
        axis.grid(alpha=0.3)
        if tag.startswith("gap"):
            axis.set_yscale("log")
    if len(curves) > 1:
        axes.flat[0].legend(fontsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _at(curve: Curve | None, step: int) -> float:
    """The value at a step; 0 where nothing is logged."""
    return dict(zip(curve.steps, curve.values, strict=True)).get(step, 0.0) if curve else 0.0
