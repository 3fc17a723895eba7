"""Read any table with a column of questions or chats: JSON Lines, Parquet, or a data set of the hub."""

from __future__ import annotations

from typing import Literal

from datamodules.messages import question_of, read_messages
from datamodules.rows import Row, in_share, read_rows, text
from qerl_pl.common.types import Message, Problem
from qerl_pl.rewards.answers import marked_answer


class Table:
    """A source that reads problems from a table; rewards see all columns of a problem's row as ``prompt.row``.

    Args:
        train_path: a .jsonl or .parquet file, or a hub name such as ``openai/gsm8k``.
        validation_path: the same for the validation rows; None takes them from the training rows.
        validation_share: share of the training rows used for validation if there is no validation_path. They are chosen
            by a hash of the question, so they are the same in every run and for any order of the rows.
        question: column of the question, or of a list of messages, ``[{"role": "user", "content": "..."}]``.
        answer: column of the verifiable answer; None if the reward needs none.
        marker: mark of the final answer if the answer column holds a worked solution: "boxed" (``\\boxed{}``) or "hash"
            (``####``); None: the column holds the answer alone.
        subset: subset of a hub data set.
        train_split: split of a hub data set.
        validation_split: split of a hub data set.
        system: column with each row's system prompt; None: the table has no such column.
        only: values to which training rows are restricted, by column, e.g. ``{level: ["Level 4", "Level 5"]}``.
        between: lowest and highest number to which training rows are restricted, by column, e.g. ``{llama8b_solve_rate:
            [0.1, 0.9]}``.

    Raises:
        ValueError: a share outside (0, 1), both or none of validation_path and validation_share, or a marker without
            an answer; while reading, if a row lacks a column or a marked answer (names file and line).
    """

    def __init__(
        self,
        train_path: str,
        validation_path: str | None = None,
        validation_share: float | None = None,
        question: str = "question",
        answer: str | None = "answer",
        marker: Literal["boxed", "hash"] | None = None,
        subset: str | None = None,
        train_split: str = "train",
        validation_split: str = "test",
        system: str | None = None,
        only: dict[str, list[str]] | None = None,
        between: dict[str, tuple[float, float]] | None = None,
    ) -> None:
        if marker is not None and answer is None:
            raise ValueError(f"marker is {marker!r} and answer is null; name the column that the answer is marked in")
        if (validation_path is None) == (validation_share is None):
            raise ValueError("give either validation_path or validation_share, one of them")
        if validation_share is not None and not 0 < validation_share < 1:
            raise ValueError(f"validation_share is {validation_share}; expected more than 0 and less than 1")
        self.train_path = train_path
        self.validation_path = validation_path
        self.validation_share = validation_share
        self.question = question
        self.answer = answer
        self.marker: Literal["boxed", "hash"] | None = marker
        self.subset = subset
        self.train_split = train_split
        self.validation_split = validation_split
        self.system = system
        self.only = only or {}
        self.between = between or {}

    def train(self) -> list[Problem]:
        """Return the training problems that pass the filters ``only`` and ``between``, in the order of the table."""
        rows = read_rows(self.train_path, subset=self.subset, split=self.train_split)
        problems = [self._problem(row) for row in rows if self._keeps(row)]
        if self.validation_share is None:
            return problems
        return [problem for problem in problems if not in_share(problem.question, self.validation_share)]

    def validation(self) -> list[Problem]:
        """Return the validation problems, in the order of the table."""
        if self.validation_path is not None:
            rows = read_rows(self.validation_path, subset=self.subset, split=self.validation_split)
            return [self._problem(row) for row in rows]
        assert self.validation_share is not None
        rows = read_rows(self.train_path, subset=self.subset, split=self.train_split)
        problems = [self._problem(row) for row in rows]
        return [problem for problem in problems if in_share(problem.question, self.validation_share)]

    def _problem(self, row: Row) -> Problem:
        answer = "" if self.answer is None else text(row, self.answer)
        if self.marker is not None:
            answer = marked_answer(answer, self.marker)
            if not answer:
                raise ValueError(f"{row.where}: no answer is marked ({self.marker}) in column {self.answer!r}")
        messages: tuple[Message, ...] = ()
        if isinstance(row.columns.get(self.question), list):
            messages = read_messages(row, self.question)
            question = question_of(messages)
        else:
            question = text(row, self.question)
        if self.system is not None:
            asked = messages or ({"role": "user", "content": question},)
            if asked[0]["role"] == "system":
                raise ValueError(f"{row.where}: there are two system prompts, in {self.question!r} and {self.system!r}")
            messages = ({"role": "system", "content": text(row, self.system)}, *asked)
        return Problem(question, answer, messages, row.columns)

    def _keeps(self, row: Row) -> bool:
        return all(text(row, column) in values for column, values in self.only.items()) and all(
            low <= _number(row, column) <= high for column, (low, high) in self.between.items()
        )


def _number(row: Row, column: str) -> float:
    value = text(row, column)
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{row.where}: column {column!r} is {value!r}; expected a number") from None
