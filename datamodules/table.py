"""Any table with a question and an answer column: JSON Lines or Parquet files, or a data set of the hub."""

from __future__ import annotations

from datamodules.rows import in_share, read_rows, text
from qerl_pl.types import Problem


class Table:
    """Problems from two columns of a table.

    Args:
        train_path: a .jsonl or .parquet file, or a hub name such as ``openai/gsm8k``.
        validation_path: the same for the validation rows; None takes them out of the training rows.
        validation_share: share of the training rows that validates where there is no validation_path, chosen by the
            question's hash: the same rows in every run, whatever their order.
        question: column of the question.
        answer: column of the verifiable answer.
        subset: of a hub data set.
        train_split: of a hub data set.
        validation_split: of a hub data set.

    Raises:
        ValueError: a share outside (0, 1), or both or none of validation_path and validation_share; when read, a row
            lacks a column (file and line are named).
    """

    def __init__(
        self,
        train_path: str,
        validation_path: str | None = None,
        validation_share: float | None = None,
        question: str = "question",
        answer: str = "answer",
        subset: str | None = None,
        train_split: str = "train",
        validation_split: str = "test",
    ) -> None:
        if (validation_path is None) == (validation_share is None):
            raise ValueError("give either validation_path or validation_share, one of them")
        if validation_share is not None and not 0 < validation_share < 1:
            raise ValueError(f"validation_share is {validation_share}; expected more than 0 and less than 1")
        self.train_path = train_path
        self.validation_path = validation_path
        self.validation_share = validation_share
        self.question = question
        self.answer = answer
        self.subset = subset
        self.train_split = train_split
        self.validation_split = validation_split

    def train(self) -> list[Problem]:
        """The training problems, in the order of the table."""
        problems = self._read(self.train_path, self.train_split)
        if self.validation_share is None:
            return problems
        return [problem for problem in problems if not in_share(problem.question, self.validation_share)]

    def validation(self) -> list[Problem]:
        """The validation problems, in the order of the table."""
        if self.validation_path is not None:
            return self._read(self.validation_path, self.validation_split)
        assert self.validation_share is not None
        problems = self._read(self.train_path, self.train_split)
        return [problem for problem in problems if in_share(problem.question, self.validation_share)]

    def _read(self, path: str, split: str) -> list[Problem]:
        rows = read_rows(path, subset=self.subset, split=split)
        return [Problem(text(row, self.question), text(row, self.answer)) for row in rows]
