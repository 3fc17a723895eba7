"""A source of problems from any table of questions or chats: JSON Lines, Parquet, or a data set of the hub."""

from dataclasses import dataclass
from typing import Literal

from datamodules.filters import Filters, Value
from datamodules.messages import chat_of_value, question_of, read_messages
from datamodules.rows import BadRows, OnBadRows, Row, in_share, read_rows
from qerl_pl.common.json_lines import is_null
from qerl_pl.common.types import Message, Problem
from qerl_pl.rewards.answers import marked_answer


@dataclass(frozen=True)
class Table:
    """A source that reads problems from a table; rewards see all columns of a problem's row as ``prompt.row``.

    A setting that names a column may also name a field of a column, e.g. ``reward_model.ground_truth``; such a column
    may hold its fields as JSON text.

    Args:
        train_path: a file of JSON lines (.jsonl, .ndjson, .json) or a .parquet file, a pattern such as
            ``data/*.parquet``, a hub name such as ``openai/gsm8k``, or a list of these.
        validation_path: the same for the validation rows; null takes a share of the training rows.
        validation_share: share of the training rows used for validation if there is no validation_path. The rows are
            chosen by a hash of the question, so the choice is the same in every run and for any order of the rows.
        question: column of the question, or of a list of messages, ``[{"role": "user", "content": "..."}]``, which may
            be stored as JSON text. If several columns are named, their texts are joined by line breaks; null: the
            column ``question``, or ``prompt`` in a row without a ``question``.
        answer: column of the verifiable answer: a text, a number, or a list of one of these; null if the reward needs
            no answer, or reads it in ``prompt.row``, for example because it is a list of several.
        marker: what marks the final answer if the answer column holds a worked solution: "boxed" (``\\boxed{}``) or
            "hash" (``####``); null: the column holds the answer alone.
        subset: subset of a hub data set.
        train_split: split of a hub data set.
        validation_split: split of a hub data set.
        system: column with each row's system prompt, or null in a row without one; null: there is no such column.
        only: maps a column to the values that training rows may have there, e.g. ``{level: [4, 5], verified: [true]}``.
            A row with null is left out.
        between: maps a column to the lowest and the highest number that training rows may have there, e.g.
            ``{llama8b_solve_rate: [0.1, 0.9]}``. A row with null is left out.
        bad_rows: what happens to a row that cannot be used, e.g. with an empty answer: "refuse" ends the run, "drop"
            leaves it out; the log then says how many rows were dropped, and why the first of them was.

    Raises:
        ValueError: a share is not in (0, 1), both or none of validation_path and validation_share are given, a marker
            without an answer column, or a filter that no row can pass; while reading with bad_rows "refuse", if a row
            lacks a column or a marked answer (the message names file and line).
    """

    train_path: str | list[str]
    validation_path: str | list[str] | None = None
    validation_share: float | None = None
    question: str | list[str] | None = None
    answer: str | None = "answer"
    marker: Literal["boxed", "hash"] | None = None
    subset: str | None = None
    train_split: str = "train"
    validation_split: str = "test"
    system: str | None = None
    only: dict[str, list[Value]] | None = None
    between: dict[str, tuple[float, float]] | None = None
    bad_rows: OnBadRows = "refuse"

    def __post_init__(self) -> None:
        if self.marker is not None and self.answer is None:
            raise ValueError(
                f"marker is {self.marker!r} and answer is null; name the column that the answer is marked in"
            )
        if (self.validation_path is None) == (self.validation_share is None):
            raise ValueError("give exactly one of validation_path and validation_share")
        if self.validation_share is not None and not 0 < self.validation_share < 1:
            raise ValueError(f"validation_share is {self.validation_share}; expected more than 0 and less than 1")
        if self.question is not None and not self.question:
            raise ValueError(f"question is {self.question!r}; expected a column, a list of columns, or null")
        BadRows(self.bad_rows)  # refuses other words
        Filters(self.only, self.between)  # refuses impossible filters before anything is read

    def train(self) -> list[Problem]:
        """Return the training problems that pass the filters ``only`` and ``between``, in the order of the table."""
        problems = self._read(self.train_path, "train_path", self.train_split, Filters(self.only, self.between))
        if self.validation_share is None:
            return problems
        return [problem for problem in problems if not in_share(problem.question, self.validation_share)]

    def validation(self) -> list[Problem]:
        """Return the validation problems, in the order of the table."""
        everything = Filters(None, None)
        if self.validation_path is not None:
            return self._read(self.validation_path, "validation_path", self.validation_split, everything)
        assert self.validation_share is not None
        problems = self._read(self.train_path, "train_path", self.train_split, everything)
        return [problem for problem in problems if in_share(problem.question, self.validation_share)]

    def _read(self, path: str | list[str], setting: str, split: str, filters: Filters) -> list[Problem]:
        bad = BadRows(self.bad_rows)
        problems, num_read, row = [], 0, None
        has_system = self.system is None
        for row in read_rows(path, setting=setting, subset=self.subset, split=split, bad=bad):
            has_system = has_system or row.has(str(self.system))
            try:
                if filters.keeps(row):
                    problems.append(self._problem(row))
                num_read += 1
            except ValueError as error:
                bad(error)
        if not has_system and row is not None:
            row.value(str(self.system))  # raises the error, because no row has this column
        bad.report(path, num_good=num_read)
        filters.report(path)
        return problems

    def _problem(self, row: Row) -> Problem:
        answer = "" if self.answer is None else row.answer(self.answer)
        if self.marker is not None:
            answer = marked_answer(answer, self.marker)
            if not answer:
                raise ValueError(f"{row.where}: no answer is marked ({self.marker}) in column {self.answer!r}")
        question, messages = self._asked(row)
        system = None if self.system is None else row.optional_text(self.system)
        if system is not None:
            asked = messages or ({"role": "user", "content": question},)
            if asked[0]["role"] == "system":
                raise ValueError(f"{row.where}: there are two system prompts, in the messages and in {self.system!r}")
            messages = ({"role": "system", "content": system}, *asked)
        return Problem(question, answer, messages, row.columns)

    def _asked(self, row: Row) -> tuple[str, tuple[Message, ...]]:
        column = self.question
        if column is None:
            column = "prompt" if "prompt" in row.columns and is_null(row.columns.get("question")) else "question"
        if not isinstance(column, str):
            return "\n".join(row.text(name) for name in column), ()
        value = row.value(column)
        chat = chat_of_value(value, f"{row.where}: column {column!r}")
        if chat is None:
            return row.text(column), ()
        messages = read_messages(chat, f"{row.where}: column {column!r}")
        return question_of(messages), messages
