"""Benchmarks to validate and test on: MATH-500, AIME 2024 and 2025, AMC 2023."""

from __future__ import annotations

from typing import Literal, NamedTuple

from datamodules.bad_rows import BadRows, OnBadRows, read_problems
from datamodules.rows import Row, text
from qerl_pl.common.types import Problem


class _Place(NamedTuple):
    path: str
    split: str
    question: str


_HUB = {
    "math500": _Place("HuggingFaceH4/MATH-500", "test", "problem"),
    "aime24": _Place("HuggingFaceH4/aime_2024", "train", "problem"),
    "aime25": _Place("math-ai/aime25", "test", "problem"),
    "amc23": _Place("math-ai/amc23", "test", "question"),
}


class Benchmark:
    """A source whose validation problems are those of a benchmark, and which has no training problems.

    Args:
        name: name of the benchmark.
        path: a .jsonl or .parquet file or a hub name, with the columns of the published data set, which None reads.
        bad_rows: "refuse" ends the run at a row that cannot be used; "drop" leaves such rows out and counts them.
    """

    def __init__(
        self,
        name: Literal["math500", "aime24", "aime25", "amc23"],
        path: str | None = None,
        bad_rows: OnBadRows = "refuse",
    ) -> None:
        BadRows(bad_rows)  # refuses other words
        self.name = name
        self.path = path
        self.bad_rows: OnBadRows = bad_rows

    def train(self) -> list[Problem]:
        """Refuse: a benchmark has no training problems.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.name} is a benchmark: nothing trains on it; pair it with a training source")

    def validation(self) -> list[Problem]:
        """Return the benchmark's problems."""
        place = _HUB[self.name]

        def problem(row: Row) -> Problem:
            return Problem(text(row, place.question), text(row, "answer").removesuffix(".0"), row=row.columns)

        return read_problems(self.path or place.path, problem, bad_rows=self.bad_rows, split=place.split)
