"""Read GSM8K, grade-school word problems with a numeric answer (arXiv 2110.14168)."""

from dataclasses import dataclass

from datamodules.rows import BadRows, OnBadRows, Row, read_problems
from qerl_pl.common.types import Problem


@dataclass(frozen=True)
class GSM8K:
    """A source of the problems of GSM8K: 7473 training problems, and as validation problems the 1319 test problems.

    Args:
        train_path: name of a data set on the Hugging Face hub, or a .jsonl or .parquet file, with the columns question
            and answer.
        validation_path: name or file of the test split, with the same columns.
        bad_rows: "refuse" ends the run at a row that cannot be used; "drop" leaves such rows out and counts them.

    Raises:
        ValueError: while reading, if a solution has no final answer; the message names file and line.
    """

    train_path: str = "openai/gsm8k"
    validation_path: str = "openai/gsm8k"
    bad_rows: OnBadRows = "refuse"

    def __post_init__(self) -> None:
        BadRows(self.bad_rows)  # refuses other words

    def train(self) -> list[Problem]:
        return _read(self.train_path, "train_path", "train", self.bad_rows)

    def validation(self) -> list[Problem]:
        return _read(self.validation_path, "validation_path", "test", self.bad_rows)


def _read(path: str, setting: str, split: str, bad_rows: OnBadRows) -> list[Problem]:
    return read_problems(path, _problem, setting=setting, bad_rows=bad_rows, subset="main", split=split)


def _problem(row: Row) -> Problem:
    _, mark, answer = row.text("answer").rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise ValueError(f"{row.where}: the solution has no final answer after '####'")
    return Problem(row.text("question"), answer, row=row.columns)
