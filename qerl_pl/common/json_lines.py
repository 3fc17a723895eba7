"""Read JSON Lines files strictly, with numbers that keep the digits of the file, and convert values to text."""

import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

from qerl_pl.common.checks import shortened

MAX_DEPTH = 64
"""Largest accepted depth of nested objects and lists in a row. Rows are copied, pickled and moved to devices by
recursive functions, and Python limits the depth of recursion."""


class Written(float):
    """Float that is printed with the digits that the file has, because 27.10 and 27.1 may be different answers."""

    def __init__(self, written: str) -> None:
        self.written = written

    def __str__(self) -> str:
        return self.written


def refuse(error: ValueError) -> NoReturn:
    """Raise the error of a row that cannot be read."""
    raise error


def read_json_lines(
    path: str | Path, bad: Callable[[ValueError], None] = refuse, *, say: Callable[[str], object]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield, for each row of a JSON Lines file in UTF-8, its location (file and line, for messages) and its object.
    Raises ValueError if the file does not exist, has no rows or begins with a list.

    ``bad`` is called with the error for a row that is not UTF-8, is no JSON object, has a duplicate key or is nested
    too deeply; if it returns, the row is skipped. ``say`` is called with a sentence on blank lines, if there are any.
    """
    if not Path(path).exists():
        raise ValueError(f"data file {path} does not exist")
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a regular file; expected a JSON Lines file, which may be read more than once")
    num_blank = number = 0
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                num_blank += 1
                continue
            where = f"{path}:{number}"
            if num_blank + 1 == number and re.match(r"\s*\[\s*(\{|$)", line):
                raise ValueError(
                    f"{where}: the file begins with a list; expected a JSON object per line, which "
                    f"`jq -c '.[]' {path} > rows.jsonl` makes of a list of objects"
                )
            try:
                row = _parse(line, where)
            except ValueError as error:
                bad(error)
            else:
                yield where, row
    if number == num_blank:
        raise ValueError(f"data file {path} has no rows; expected a JSON object per line")
    if num_blank:
        say(f"{path}: skipped {num_blank} blank lines")


def object_in_text(text: str) -> dict[str, object] | None:
    """Parse a text that is a JSON object, with numbers that keep the digits; return None for any other text."""
    try:
        value = json.loads(text, parse_float=Written) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_json(value: object) -> str:
    """Write a row that ``read_json_lines`` has read, or a value in it, as JSON; numbers keep the digits of the file."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {as_json(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    return value.written if isinstance(value, Written) else json.dumps(value)


def is_null(value: object) -> bool:
    """Return whether a value of a data set is missing: null, or NaN, which pandas writes for null."""
    return value is None or (isinstance(value, float | Decimal) and math.isnan(value))


def stored_text(value: object, where: str) -> str:
    """Convert a text or number of a data set to text; a number keeps the digits that the file has. Raises ValueError if
    the value is missing, not finite, neither text nor a number, or not valid Unicode."""
    if is_null(value):
        raise ValueError(f"{where} is {'null' if value is None else 'NaN'}; expected text or a number")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"{where} is {shortened(repr(value))}; expected text or a number")
    if isinstance(value, float | Decimal) and not math.isfinite(value) and not isinstance(value, Written):
        raise ValueError(f"{where} is {value}; expected text or a finite number")
    text = format(value, "f") if isinstance(value, Decimal) else str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is no valid Unicode text: {error}") from None
    return text


def only_entry(value: object) -> object:
    """Return the entry of a list with one entry, because some data sets store an answer as such a list; return any
    other value unchanged."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _parse(line: str, where: str) -> dict[str, object]:
    try:
        if not line.isascii():
            line.encode()
        row = json.loads(line, parse_float=Written, object_pairs_hook=_without_repeats)
        if line.count("[") + line.count("{") > MAX_DEPTH and _depth(row) > MAX_DEPTH:
            raise RecursionError
    except UnicodeEncodeError:
        raise ValueError(f"{where} is not UTF-8: {line.strip()[:60]!r}") from None
    except json.JSONDecodeError as error:
        fault = f"{error.msg} at column {error.colno} of {line.strip()[:60]!r}"
        raise ValueError(f"{where}: not JSON: {fault}; expected a JSON object per line") from error
    except RecursionError:
        expected = f"expected at most {MAX_DEPTH} levels"
        raise ValueError(f"{where}: brackets are nested too deeply to be read; {expected}") from None
    except _RepeatedKeyError as error:
        raise ValueError(f"{where}: {error}") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise ValueError(f"{where}: a number has too many digits to be read (Python reads up to 4300)") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {line.strip()[:60]} is not a JSON object")
    return row


class _RepeatedKeyError(ValueError):
    """Error of a JSON object that has the same key twice."""


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _RepeatedKeyError(f"the key {repeated[:60]!r} is given twice; leave one of them")
    return row


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)
