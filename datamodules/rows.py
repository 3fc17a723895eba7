"""Read rows of a data set from local files or the hub, each with its location for error messages."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info

from qerl_pl.common.json_lines import is_null, object_in_text, only_entry, read_json_lines, refuse, stored_text
from qerl_pl.common.packages import not_installed
from qerl_pl.common.phases import phase

# most characters of a question or an answer; a longer one is taken for a broken row, and tokenising it takes minutes
MAX_TEXT = 1_000_000
JSON_LINES = (".jsonl", ".ndjson", ".json")
"""Endings of files with a JSON object per line."""


class Row(NamedTuple):
    """One row as it is stored."""

    where: str
    """Location of a row for error messages: file and line, or data set and row number."""
    columns: dict[str, object]


class NoColumnError(ValueError):
    """A row has no column of a given name."""


def read_rows(
    path: str | Sequence[str], *, split: str, subset: str | None = None, bad: Callable[[ValueError], None] = refuse
) -> Iterator[Row]:
    """Read the rows of JSON Lines files, .parquet files or a data set of the hub, in order.

    Args:
        path: a file, a pattern of files such as ``data/*.parquet`` (read in the order of their names), the name of a
            data set on the hub (or of a local copy of one), or a list of these. ``~`` is the home folder.
        split: split of a hub data set; not used for a file.
        subset: subset of a hub data set; not used for a file.
        bad: is called with the error of a row of a JSON Lines file that cannot be read; raises it by default.

    Raises:
        ValueError: there is no such file or data set, it cannot be read, has no rows, or is named twice.
    """
    paths = [each for given in ([path] if isinstance(path, str) else path) for each in _named(given)]
    if not paths:
        raise ValueError("the list of data files is empty; name at least one")
    repeated = next((each for each in paths if paths.count(each) > 1), None)
    if repeated is not None:
        raise ValueError(f"the data {repeated} is named twice; its rows would count twice")
    for each in paths:
        yield from _rows_of(each, split=split, subset=subset, bad=bad)


def value_of(row: Row, column: str) -> object:
    """Return the value in a row's column. A name with dots may name a field in a column, e.g.
    ``reward_model.ground_truth``; the field of a column that is null is null. The column may hold the JSON text of an
    object.

    Raises:
        NoColumnError: the row has no such column or field.
    """
    if column in row.columns:
        return row.columns[column]
    found: object = row.columns
    for name in column.split("."):
        if found is None:
            return None
        found = object_in_text(found) if isinstance(found, str) else found
        if not isinstance(found, Mapping) or name not in found:
            raise NoColumnError(
                f"{row.where}: no column {column!r}; the row has {', '.join(map(repr, _names(row.columns)))}. The "
                "settings question, answer and system of datamodules.table.Table name other columns"
            )
        found = found[name]
    return found


def text(row: Row, column: str) -> str:
    """Return the text or number in a row's column as text.

    Raises:
        ValueError: the row has no such column, or the value is missing, empty or of another type.
    """
    return _filled(value_of(row, column), row, column)


def answer_text(row: Row, column: str) -> str:
    """Return a known answer as text; it may be the only entry of a list.

    Raises:
        ValueError: as for ``text``, or the list has more entries.
    """
    return _filled(only_entry(value_of(row, column)), row, column)


def optional_text(row: Row, column: str) -> str | None:
    """Return the text in a row's column as ``text`` does; None if the row lacks the column, or it is null or blank."""
    try:
        value = value_of(row, column)
    except NoColumnError:
        return None
    if is_null(value) or (isinstance(value, str) and not value.strip()):
        return None
    return _filled(value, row, column)


def in_share(question: str, share: float) -> bool:
    """Tell by a hash of its text whether a question belongs to a ``share`` of all questions, such as those held out."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


def _filled(value: object, row: Row, column: str) -> str:
    where = f"{row.where}: column {column!r}"
    found = stored_text(value, where)
    if not any(letter.isprintable() and not letter.isspace() for letter in found):  # U+200B, say, shows nothing
        raise ValueError(f"{where} is empty")
    if len(found) > MAX_TEXT:
        raise ValueError(f"{where} has {len(found)} characters; expected at most {MAX_TEXT}")
    return found


def _names(columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of columns, and those of fields in columns with dots."""
    for name, value in columns.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value)


def _named(path: str) -> list[str]:
    """Return the files that a pattern stands for, and any other path as it is, with the home folder for ``~``."""
    path = os.path.expanduser(path)
    if not glob.has_magic(path) or Path(path).exists():
        return [path]
    found = sorted(each for each in glob.glob(path, recursive=True) if Path(each).is_file())
    if not found:
        raise ValueError(f"no file matches {path}")
    return found


def _rows_of(path: str, *, split: str, subset: str | None, bad: Callable[[ValueError], None]) -> Iterator[Row]:
    suffix = Path(path).suffix.lower()
    if suffix in JSON_LINES:
        return (Row(where, columns) for where, columns in read_json_lines(path, bad, say=rank_zero_info))
    if suffix == ".parquet":
        return _parquet_rows(path)
    if Path(path).is_file():
        raise ValueError(
            f"data file {path} is of a kind that is not read; expected .jsonl (a JSON object per line) or .parquet"
        )
    return _hub_rows(path, split=split, subset=subset)


def _parquet_rows(path: str) -> Iterator[Row]:
    from datamodules.arrow import parquet_rows  # pyarrow is heavy, and files of this kind are rare

    if not Path(path).is_file():
        raise ValueError(f"data file {path} does not exist")
    for number, columns in enumerate(parquet_rows(path)):
        yield Row(f"{path}, row {number}", columns)


def _hub_rows(name: str, *, split: str, subset: str | None) -> Iterator[Row]:
    try:
        from datasets import load_dataset  # heavy, and not needed for local files
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot load {name}: {not_installed('datasets')}, or give a local .jsonl file") from error
    from datamodules.arrow import dataset_rows

    try:
        with phase(f"reading {name} from the Hugging Face hub or its cache here", at_once=True):
            table = load_dataset(name, subset, split=split)  # code of the repository is never run
    except Exception as error:  # the library reads files of any kind with other libraries, which raise errors of theirs
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"cannot load {name}: {said}; a local .jsonl or .parquet file does as well") from error
    if len(table) == 0:
        raise ValueError(f"{name}, {split} has no rows")
    for number, columns in enumerate(dataset_rows(table)):
        yield Row(f"{name}, {split} row {number}", columns)
