"""Restrict rows to values and ranges of numbers in their columns; a null is outside of every restriction."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from lightning.pytorch.utilities import rank_zero_info

from datamodules.rows import NoColumnError, Row
from qerl_pl.common.json_lines import is_null, stored_text

Value = bool | int | float | str


class Filters:
    """Restrictions of rows, which count the rows that they leave out.

    Args:
        only: values to which rows are restricted, by column. Numbers are compared as numbers, also where one of the two
            is text, and true and false with the texts true and false.
        between: lowest and highest number to which rows are restricted, by column.

    Raises:
        ValueError: a list of values is empty, or a range has no numbers in it.
    """

    def __init__(
        self, only: Mapping[str, Sequence[Value]] | None, between: Mapping[str, tuple[float, float]] | None
    ) -> None:
        for column, values in (only or {}).items():
            if not values or any(map(is_null, values)):
                raise ValueError(
                    f"only has {[*values]} for {column!r}; expected values, and a row with null is left out"
                )
        for column, (low, high) in (between or {}).items():
            if not low <= high:
                raise ValueError(f"between has [{low}, {high}] for {column!r}; expected the lower number first")
        self.only = {column: {_comparable(value) for value in values} for column, values in (only or {}).items()}
        self.between = dict(between or {})
        # Error of the first row without a restricted column; None if another row has it.
        self._missing: dict[str, NoColumnError | None] = {}
        self._num_null: Counter[str] = Counter()
        self._num_rows = self._num_kept = 0

    def keeps(self, row: Row) -> bool:
        """Tell whether a row passes all restrictions, where a missing column counts as null; ValueError if a value is
        neither text, number nor bool, or no number where a range is given."""
        passes = []
        for column in dict.fromkeys((*self.only, *self.between)):
            value = self._value(row, column)
            where = f"{row.where}: column {column!r}"
            if value is None:
                self._num_null[column] += 1
                passes.append(False)
                continue
            if column in self.only:
                text = value if isinstance(value, bool) else stored_text(value, where)
                passes.append(_comparable(text) in self.only[column])
            if column in self.between:
                low, high = self.between[column]
                passes.append(low <= _number(value, where) <= high)
        self._num_rows += 1
        self._num_kept += all(passes)
        return all(passes)

    def report(self, path: str | Sequence[str]) -> None:
        """Log how many rows were left out, and how many had null; NoColumnError if no row has a restricted column."""
        for error in filter(None, self._missing.values()):
            raise error
        if self._num_kept < self._num_rows:
            nulls = "".join(f"; {num} rows have null in {column!r}" for column, num in self._num_null.items())
            rank_zero_info(f"data: only and between keep {self._num_kept} of {self._num_rows} rows of {path}{nulls}")

    def _value(self, row: Row, column: str) -> object:
        try:
            value = row.value(column)
        except NoColumnError as error:
            self._missing.setdefault(column, error)
            return None
        self._missing[column] = None
        return None if is_null(value) else value


def _comparable(value: Value) -> Decimal | str:
    """Return the same for values that are to be equal: of a number as text and as a number, a Decimal."""
    text = str(value)
    if text in ("True", "False"):
        return text.lower()
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    return number if number.is_finite() else text


def _number(value: object, where: str) -> float:
    try:
        number = (
            math.nan
            if isinstance(value, bool)
            else float(value if isinstance(value, float) else stored_text(value, where))
        )
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{where} is {str(value)[:80]!r}; expected a number")
    return number
