"""The text of a value that is stored in a data set, as its author sees it."""

from __future__ import annotations

import math
from decimal import Decimal


class Written(float):
    """A float that is printed with the digits that the file has, because 27.10 and 27.1 may be different answers."""

    def __init__(self, written: str) -> None:
        self.written = written

    def __str__(self) -> str:
        return self.written


def is_null(value: object) -> bool:
    """Tell whether a stored value is missing: null, or NaN, which pandas writes for it."""
    return value is None or (isinstance(value, float | Decimal) and math.isnan(value))


def stored_text(value: object, where: str) -> str:
    """Return a stored text or number as text, with the digits that it is stored with.

    Args:
        value: text, a whole number, a float or a Decimal.
        where: file, line and column, for the error message.

    Raises:
        ValueError: the value is missing, not finite, no text and no number, or not valid Unicode.
    """
    if is_null(value):
        raise ValueError(f"{where} is {'null' if value is None else 'NaN'}; expected text or a number")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"{where} is {_short(value)}; expected text or a number")
    if isinstance(value, float | Decimal) and not math.isfinite(value) and not isinstance(value, Written):
        raise ValueError(f"{where} is {value}; expected text or a finite number")
    found = format(value, "f") if isinstance(value, Decimal) else str(value)
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is no valid Unicode text: {error}") from None
    return found


def only_entry(value: object) -> object:
    """Return the entry of a list with one entry, in which some data sets store an answer, and other values as they
    are."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."
