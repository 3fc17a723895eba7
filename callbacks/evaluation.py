"""Print the table of results at the end of an evaluation: avg@n and pass@k with confidence intervals."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from qerl_pl.common.files import write_whole
from qerl_pl.evaluation.pass_at_k import accuracy, score_interval
from qerl_pl.module import QeRLModule


class EvaluationReport(Callback):
    """Prints the results of an evaluation outside of training and writes them to ``run_dir/evaluation/validate.json``
    or ``test.json``.

    A completion counts as right if the first reward in ``model.rewards`` gives it 1. A completion that could not be
    scored counts as wrong, because leaving it out would make a hard problem look easy; the table has the share of such
    completions.
    """

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: QeRLModule) -> None:
        if trainer.state.fn in (None, "fit") or not trainer.is_global_zero:
            return
        n, name = pl_module.settings.evaluation.num_completions, pl_module.rewards[0].name
        checkpoint = trainer.ckpt_path and str(trainer.ckpt_path)
        summary = {"checkpoint": checkpoint, **summarize(pl_module.evaluated, n=n, name=name)}
        path = Path(trainer.default_root_dir) / "evaluation" / f"{trainer.state.fn.value}.json"
        write_whole(path, json.dumps(summary, indent=1) + "\n")
        title = f"{Path(checkpoint).name if checkpoint else 'the base'}, {summary['num_problems']} problems x {n}"
        title += f", right: {name} = 1"
        table = Table("", "value", "95 % interval", title=title)
        for key, value in summary["accuracy"].items():
            table.add_row(key, f"{value['mean']:.4f}", f"{value['low']:.4f} to {value['high']:.4f}")
        for key in ("truncated_share", "unscored_share", "mean_tokens"):
            table.add_row(key, f"{summary[key]:.4g}", "")
        Console().print(table)
        print(f"written to {path}")

    on_test_end = on_validation_end  # pyright: ignore[reportAssignmentType]


def summarize(rows: list[dict[str, Any]], *, n: int, name: str) -> dict[str, Any]:
    """Compute the results of an evaluation, which are printed and written as JSON. ``rows`` are the records of
    completions, ordered by problem, ``n`` for each problem. Returns the metrics avg@n and pass@k with confidence
    intervals, the shares of truncated and of unscored completions, and the mean length. A completion is right if the
    reward ``name`` gives it 1. Raises ValueError if there are no records, or their number is no multiple of n."""
    if not rows or len(rows) % n:
        raise ValueError(f"{len(rows)} records are no whole number of problems with {n} completions each")
    right = torch.tensor([row["rewards"][name] == 1 for row in rows]).view(-1, n).sum(dim=1)  # [P]
    accuracies = {}
    for key, values in accuracy(right, n).items():
        low, high = score_interval(values, n)
        accuracies[key] = {"mean": values.mean().item(), "low": low, "high": high}
    return {
        "num_problems": len(right),
        "num_completions": n,
        "right": f"{name} = 1",
        "accuracy": accuracies,
        "truncated_share": sum(not row["finished"] for row in rows) / len(rows),
        "unscored_share": sum(row["reward"] is None for row in rows) / len(rows),
        "mean_tokens": sum(row["num_tokens"] for row in rows) / len(rows),
    }
