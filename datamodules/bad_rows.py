"""Refuse, or drop and count, the rows of a data set that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info

from datamodules.rows import NoColumnError

OnBadRows = Literal["refuse", "drop"]


class BadRows:
    """Receives the errors of rows that cannot be used.

    Args:
        action: "refuse" raises the error of the first such row; "drop" counts them.
    """

    def __init__(self, action: OnBadRows) -> None:
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
