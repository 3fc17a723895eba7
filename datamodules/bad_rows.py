"""Refuse, or drop and count, the rows of a data set that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info

from datamodules.rows import NoColumnError, Row, read_rows
from qerl_pl.common.types import Problem

OnBadRows = Literal["refuse", "drop"]


class BadRows:
    """Receives the errors of rows that cannot be used.

    Args:
        action: "refuse" raises the error of the first such row; "drop" counts them.

    Raises:
        ValueError: ``action`` is neither.
    """

    def __init__(self, action: OnBadRows) -> None:
        if action not in ("refuse", "drop"):
            raise ValueError(f"bad_rows is {action!r}; expected 'refuse' or 'drop'")
        self.action = action
        self.num = 0
        self.first: ValueError | None = None

    def __call__(self, error: ValueError) -> None:
        """Raise the error of a row, or count it."""
        if self.action == "refuse":
            if isinstance(error, NoColumnError):
                raise error
            raise ValueError(f"{error}. To leave such rows out, set bad_rows to drop") from error
        self.num += 1
        self.first = self.first or error

    def report(self, path: str | Sequence[str], *, num_good: int) -> None:
        """Log the number of dropped rows and the first one's error.

        Raises:
            ValueError: all rows were dropped.
        """
        if self.first is None:
            return
        if num_good == 0:
            raise ValueError(f"bad_rows drops all {self.num} rows of {path}; the first: {self.first}") from self.first
        rank_zero_info(
            f"data: dropped {self.num} of {self.num + num_good} rows of {path} that cannot be used; the first: "
            f"{self.first}"
        )


def read_problems(
    path: str, make: Callable[[Row], Problem], *, bad_rows: OnBadRows, split: str, subset: str | None = None
) -> list[Problem]:
    """Read a table with one problem per row.

    Args:
        path, split, subset: as in ``rows.read_rows``.
        make: returns a row's problem; raises ValueError for a row that cannot be used.
        bad_rows: "refuse" or "drop", see ``BadRows``.
    """
    bad, problems = BadRows(bad_rows), []
    for row in read_rows(path, split=split, subset=subset, bad=bad):
        try:
            problems.append(make(row))
        except ValueError as error:
            bad(error)
    bad.report(path, num_good=len(problems))
    return problems
