"""Restrict the rows of a table to given values, or ranges of numbers, in some columns. A row with null in a restricted
column is left out."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation

from lightning.pytorch.utilities import rank_zero_info

from datamodules.rows import NoColumnError, Row
from qerl_pl.common.json_lines import is_null, stored_text

Value = bool | int | float | str


class Filters:
    """Restricts rows to given values, or ranges of numbers, in some columns, and counts the rows that are left out.

    Args:
        only: maps a column to the values that a row may have there. Numbers are compared as numbers, even if one of
            them is stored as text; true and false equal the texts "true" and "false", in lower or title case.
        between: maps a column to the lowest and the highest number that a row may have there.

    Raises:
        ValueError: a list of values is empty or has null, or the low end of a range is above its high end.
    """

    def __init__(
        self, only: Mapping[str, Sequence[Value]] | None, between: Mapping[str, tuple[float, float]] | None
    ) -> None:
        for column, values in (only or {}).items():
            if not values or any(map(is_null, values)):
                raise ValueError(
                    f"only has {[*values]} for {column!r}; expected at least one value and "
                    "no null: rows with null are always left out"
                )
        for column, (low, high) in (between or {}).items():
            if not low <= high:
                raise ValueError(f"between has [{low}, {high}] for {column!r}; expected the lower number first")
        self.only = {column: {_comparable(value) for value in values} for column, values in (only or {}).items()}
        self.between = dict(between or {})
        # Maps each restricted column to the error of the first row without it, or to None after a row with the column.
        self._missing: dict[str, NoColumnError | None] = {}
        self._num_null: Counter[str] = Counter()
        self._num_rows = self._num_kept = 0

    def keeps(self, row: Row) -> bool:
        """Return whether ``only`` and ``between`` allow the values of a row; a missing column counts as null. Raises
        ValueError if a restricted column holds something other than text, number or bool, or a column that is
        restricted to a range holds no number."""
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
        """Log how many rows passed the filters, and how many had null in a column with a filter. Raises NoColumnError
        if a filter is for a column that no row has."""
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
    """Convert a value for comparisons: a number, also one stored as text, to a Decimal, and True to "true"."""
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
