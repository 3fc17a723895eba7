"""Report on runs from their TensorBoard event files: a table of results, a picture of curves, and an HTML page."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qerl_pl.common.files import replacing, write_whole
from qerl_pl.common.run_folder import is_running
from qerl_pl.results.curves import Curve, read_curves, summarize
from qerl_pl.tools.options import report_options
from qerl_pl.tools.page.collect import collect
from qerl_pl.tools.page.follow import make_server
from qerl_pl.tools.page.render import render

CURVES = (
    ("val/accuracy", "accuracy on held-out problems"),
    ("train/reward", "reward of the rollouts"),
    ("policy/entropy", "entropy (nats per token)"),
    ("aqn/sigma", "noise sigma"),
    ("rollout/completion_tokens", "tokens per completion"),
    ("gap/mean_abs", "sampler-trainer gap (nats)"),
)


def main(argv: list[str]) -> int:
    """Parse the command line and report; returns the exit status."""
    parser = report_options()
    options = parser.parse_args(argv)
    try:
        curves = {run: (started_curves if options.follow else read_curves)(run) for run in options.runs}
        summaries = {run: summarize(found) for run, found in curves.items()}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(summaries)
    if options.picture:
        draw(curves, options.picture)
        print(f"curves: {options.picture}")
    if options.json:
        lines = [json.dumps({"run": run.name, **summary}) for run, summary in summaries.items()]
        write_whole(options.json, "\n".join(lines) + "\n")
    if options.html:
        summary, blocks = collect(options.runs, limit=options.completions)
        write_whole(options.html, render(summary, blocks))
        print(f"page: {options.html}")
    if options.follow:
        try:
            serve(options.runs, port=options.port, limit=options.completions)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def started_curves(run: Path) -> dict[str, Curve]:
    """Read a run's curves like ``read_curves``, but if the run has started and logged no value yet, wait for the first.

    Raises:
        ValueError: the folder has no readable values, and no process is running the run.
    """
    said = False
    while is_running(run):
        with suppress(ValueError):
            return read_curves(run)
        if not said:
            print(f"waiting for the first values of {run}", flush=True)
            said = True
        time.sleep(1)
    return read_curves(run)


def serve(runs: Sequence[Path], *, port: int, limit: int) -> None:
    """Serve the page of some runs until Ctrl-C.

    Raises:
        ValueError: another program uses the port.
    """
    try:
        server = make_server(runs, port=port, limit=limit)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(f"port {port} is in use by another program; give another one by --port") from error
    print(f"following at http://{server.server_address[0]}:{server.server_address[1]} (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def print_table(summaries: dict[Path, dict[str, float]]) -> None:
    """Print a table of the runs' summaries (accuracy, reward, speed, ...), one column per run."""
    table = Table("", *(run.name for run in summaries))
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary):
        table.add_row(name, *(f"{summary[name]:.4g}" if name in summary else "-" for summary in summaries.values()))
    Console().print(table)


def draw(curves: dict[Path, dict[str, Curve]], picture: Path) -> None:
    """Draw the runs' logged curves into a picture file: one panel per quantity, one line per run."""
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
    with replacing(picture) as temporary:
        figure.savefig(temporary, dpi=120, format=picture.suffix[1:].lower())
    plt.close(figure)
