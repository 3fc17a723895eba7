"""Read rows of a data set from a local file or the hub, each with its location for error messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_info

from qerl_pl.common.extras import not_installed

# most characters of a question or an answer; a longer one is taken for a broken row, and tokenising it takes minutes
MAX_TEXT = 1_000_000


class Written(float):
    """A float that is printed with the digits that the file has, because 27.10 and 27.1 may be different answers."""

    def __init__(self, written: str) -> None:
        self.written = written

    def __str__(self) -> str:
        return self.written


class Row(NamedTuple):
    """One row as it is stored."""

    where: str
    """Location of a row for error messages: file and line, or data set and row number."""
    columns: dict[str, object]


def read_rows(path: str, *, split: str, subset: str | None = None) -> Iterator[Row]:
    """Read the rows of a .jsonl file, a .parquet file, or a data set of the hub, in order.

    Args:
        path: a file, or the name of a data set on the hub (or of a local copy of one).
        split: split of a hub data set; not used for a file.
        subset: subset of a hub data set; not used for a file.
    Raises:
        ValueError: there is no such file or data set, or it cannot be read.
    """
    if path.endswith(".jsonl"):
        return jsonl_rows(path)
    if path.endswith(".parquet"):
        return _parquet_rows(path)
    if Path(path).is_file():
        raise ValueError(
            f"data file {path} is of a kind that is not read; expected .jsonl (a JSON object per line) or .parquet"
        )
    return _hub_rows(path, split=split, subset=subset)


def jsonl_rows(path: str) -> Iterator[Row]:
    """Read the rows of a JSON Lines file. Blank lines are skipped and counted; numbers keep the digits of the file.

    Raises:
        ValueError: the file is missing, empty or not UTF-8, or a line is not a JSON object.
    """
    if not Path(path).is_file():
        raise ValueError(f"data file {path} does not exist")
    num_blank = number = 0
    with open(path, encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Row(f"{path}:{number}", _parse(line, f"{path}:{number}"))
                else:
                    num_blank += 1
        except UnicodeDecodeError as error:
            raise ValueError(f"data file {path} is not UTF-8: {error}") from error
    if number == num_blank:
        raise ValueError(f"data file {path} has no rows; expected a JSON object per line")
    if num_blank:
        rank_zero_info(f"{path}: skipped {num_blank} blank lines")


def text(row: Row, column: str) -> str:
    """Return the text or number in a row's column as text.

    Raises:
        ValueError: the row has no such column, or the value is empty or of another type.
    """
    if column not in row.columns:
        raise ValueError(
            f"{row.where}: no column {column!r}; the row has {', '.join(map(repr, row.columns))}. The settings "
            "question, answer and system of datamodules.table.Table name other columns"
        )
    value = row.columns[column]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{row.where}: column {column!r} is {value!r}; expected text or a number")
    if not str(value).strip():
        raise ValueError(f"{row.where}: column {column!r} is empty")
    found = str(value)
    if len(found) > MAX_TEXT:
        raise ValueError(f"{row.where}: column {column!r} has {len(found)} characters; expected at most {MAX_TEXT}")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{row.where}: column {column!r} is no valid Unicode text: {error}") from None
    return found


def in_share(question: str, share: float) -> bool:
    """Tell by a hash of its text whether a question belongs to a ``share`` of all questions, such as those held out."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


def _parquet_rows(path: str) -> Iterator[Row]:
    from pyarrow import parquet  # heavy, and files of this kind are rare

    if not Path(path).is_file():
        raise ValueError(f"data file {path} does not exist")
    for number, columns in enumerate(parquet.read_table(path).to_pylist()):
        yield Row(f"{path}, row {number}", columns)


def _hub_rows(name: str, *, split: str, subset: str | None) -> Iterator[Row]:
    try:
        from datasets import load_dataset  # heavy, and not needed for local files
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot load {name}: {not_installed('datasets')}, or give a local .jsonl file") from error
    try:
        table = load_dataset(name, subset, split=split)  # code of the repository is never run
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(f"cannot load {name}: {error}; a local .jsonl or .parquet file does as well") from error
    for number, columns in enumerate(table):
        yield Row(f"{name}, {split} row {number}", dict(columns))


def _parse(line: str, where: str) -> dict[str, object]:
    try:
        row = json.loads(line, parse_float=Written)
    except json.JSONDecodeError as error:
        found = f"{error.msg} at column {error.colno} of {line.strip()[:60]!r}"
        raise ValueError(f"{where}: not JSON: {found}; expected a JSON object per line") from error
    except RecursionError:
        raise ValueError(f"{where}: brackets are nested too deeply to be read") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {line.strip()[:60]} is not a JSON object")
    return row
