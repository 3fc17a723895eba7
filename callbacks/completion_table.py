"""Print a few completions with their rewards on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from typing_extensions import override

from qerl_pl.common.loggers import question_of, scores_of
from qerl_pl.module import QeRLModule


class CompletionTable(Callback):
    """Prints a few completions of a rollout with their rewards and, where a reward gave one, the reason.

    They are chosen from the first rank's completions ordered by reward: the best, the worst and some in between. Of a
    long text only the end is shown, where the question or the answer is; ``RUN/completions`` has the full texts.

    Args:
        every: rollouts from one table to the next; the first rollout of a run has one.
        num_rows: completions per table.
        max_chars: characters shown of a question and of a completion.
        where: "terminal" prints only where the output is a terminal; "anywhere" prints to a file or a job's log too.

    Raises:
        ValueError: a value is out of its range.

    Example:
        trainer:
          callbacks+:
            - class_path: callbacks.completion_table.CompletionTable
              init_args: {every: 10, num_rows: 4}
    """

    def __init__(
        self,
        every: int = 10,
        num_rows: int = 4,
        max_chars: int = 300,
        where: Literal["terminal", "anywhere"] = "terminal",
    ) -> None:
        for name, value in (("every", every), ("num_rows", num_rows), ("max_chars", max_chars)):
            if value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1 (leave the callback out to print nothing)")
        if where not in ("terminal", "anywhere"):
            raise ValueError(f"where is {where!r}; expected 'terminal' or 'anywhere'")
        self.every, self.num_rows, self.max_chars, self.where = every, num_rows, max_chars, where

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: QeRLModule, outputs: Any, *_: Any) -> None:
        index = outputs["rollout_index"]
        if not trainer.is_global_zero or index % self.every or not (self.where == "anywhere" or sys.stdout.isatty()):
            return
        rows = spread_over_rewards(outputs["rollout"].sampled.rows(), self.num_rows)
        with tqdm.external_write_mode(file=sys.stdout):
            Console().print(completion_table(rows, title=f"rollout {index + 1}", max_chars=self.max_chars))


def spread_over_rewards(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Choose at most ``count`` records at equal distances, from the highest reward to the lowest and unscored ones."""
    ordered = sorted(rows, key=lambda row: -float("inf") if row["reward"] is None else row["reward"], reverse=True)
    count = min(count, len(ordered))
    return [ordered[at * (len(ordered) - 1) // max(1, count - 1)] for at in range(count)]


def completion_table(rows: Sequence[Mapping[str, Any]], *, title: str, max_chars: int) -> Table:
    """Format records of ``ScoredBatch.rows`` for a terminal, with the last characters of questions and completions."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_lines=True)
    for name in ("reward", "scores", "question", "completion", "answer"):
        table.add_column(name, justify="right" if name == "reward" else "left", overflow="fold")
    for row in rows:
        reward = "not scored" if row["reward"] is None else f"{row['reward']:.3g}"
        texts = (scores_of(row), _end(question_of(row), max_chars), _end(row["completion"], max_chars), row["answer"])
        table.add_row(reward, *(Text(printable(str(text))) for text in texts))
    return table


def printable(text: str) -> str:
    """Replace control characters other than line breaks, which could steer the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text.replace("\t", "    "))


def _end(text: str, max_chars: int) -> str:
    text = text.strip()
    return text if len(text) <= max_chars else f"\u2026{text[-max_chars:]}"
