"""GSM8K, grade-school word problems with a numeric answer (arXiv 2110.14168)."""

from __future__ import annotations

from datamodules.rows import Row, read_rows, text
from qerl_pl.common.types import Problem


class GSM8K:
    """7473 training problems; the 1319 test problems validate.

    Args:
        train_path: hub name, or a .jsonl or .parquet file with the columns question and answer.
        validation_path: the same for the test split.

    Raises:
        ValueError: when read, a solution has no final answer (file and line are named).
    """

    def __init__(self, train_path: str = "openai/gsm8k", validation_path: str = "openai/gsm8k") -> None:
        self.train_path = train_path
        self.validation_path = validation_path

    def train(self) -> list[Problem]:
        """The training problems."""
        return [_problem(row) for row in read_rows(self.train_path, subset="main", split="train")]

    def validation(self) -> list[Problem]:
        """The test problems."""
        return [_problem(row) for row in read_rows(self.validation_path, subset="main", split="test")]


def _problem(row: Row) -> Problem:
    _, mark, answer = text(row, "answer").rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise ValueError(f"{row.where}: the solution has no final answer after '####'")
    return Problem(text(row, "question"), answer, row=row.columns)
