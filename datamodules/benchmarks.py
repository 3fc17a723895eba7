"""Benchmarks of mathematical problems to validate and test on: MATH-500, AIME 2024 and 2025, AMC 2023."""

from dataclasses import dataclass
from typing import Literal

from datamodules.rows import BadRows, OnBadRows, Row, read_problems
from qerl_pl.common.types import Problem

_HUB = {  # by name of the benchmark: data set on the Hugging Face hub, its split, and its column of questions
    "math500": ("HuggingFaceH4/MATH-500", "test", "problem"),
    "aime24": ("HuggingFaceH4/aime_2024", "train", "problem"),
    "aime25": ("math-ai/aime25", "test", "problem"),
    "amc23": ("math-ai/amc23", "test", "question"),
}


@dataclass(frozen=True)
class Benchmark:
    """A source whose validation problems are those of a benchmark, and which has no training problems.

    Args:
        name: name of the benchmark: math500, aime24, aime25 or amc23.
        path: a .jsonl or .parquet file or a hub name, with the columns of the published data set; null reads the
            published data set from the hub.
        bad_rows: "refuse" ends the run at a row that cannot be used; "drop" leaves such rows out and counts them.
    """

    name: Literal["math500", "aime24", "aime25", "amc23"]
    path: str | None = None
    bad_rows: OnBadRows = "refuse"

    def __post_init__(self) -> None:
        BadRows(self.bad_rows)  # refuses other words

    def train(self) -> list[Problem]:
        """Raise ValueError: a benchmark has no training problems."""
        raise ValueError(f"{self.name} is a benchmark: it has no training problems; pair it with a training source")

    def validation(self) -> list[Problem]:
        path, split, question = _HUB[self.name]

        def problem(row: Row) -> Problem:
            return Problem(row.text(question), row.text("answer").removesuffix(".0"), row=row.columns)

        return read_problems(self.path or path, problem, setting="path", bad_rows=self.bad_rows, split=split)
