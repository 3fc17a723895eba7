"""Read rows of a data set, each with its location for error messages, and refuse or drop those that cannot be used."""

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from lightning.pytorch.utilities import rank_zero_info

from qerl_pl.common.checks import shortened
from qerl_pl.common.files import searched
from qerl_pl.common.json_lines import is_null, object_in_text, only_entry, read_json_lines, refuse, stored_text
from qerl_pl.common.packages import not_installed
from qerl_pl.common.phases import phase
from qerl_pl.common.types import Problem

# limit on the characters of a question or an answer; a longer text is probably a fault in the data, and would take
# minutes to tokenise
MAX_TEXT = 1_000_000
JSON_LINES = (".jsonl", ".ndjson", ".json")  # endings of files with a JSON object per line
OnBadRows = Literal["refuse", "drop"]


class NoColumnError(ValueError):
    """Raised if a row lacks a column, or a column lacks a field."""


class Row(NamedTuple):
    """One row of a data set, as it is stored, with its location (file and line, or data set and row number)."""

    where: str
    columns: dict[str, object]

    def value(self, column: str) -> object:
        """Return the row's value in a column, or in a field of a column whose values are mappings, such as
        ``reward_model.ground_truth``. A column may hold its fields as JSON text. If the column is null, its fields are
        null. Raises NoColumnError if the row has no such column or field."""
        if column in self.columns:
            return self.columns[column]
        value: object = self.columns
        for name in column.split("."):
            if value is None:
                return None
            value = object_in_text(value) if isinstance(value, str) else value
            if not isinstance(value, Mapping) or name not in value:
                raise NoColumnError(
                    f"{self.where}: no column {column!r}; the row has {', '.join(map(repr, self._names()))}. The "
                    "settings question, answer and system of datamodules.table.Table can name other columns"
                )
            value = value[name]
        return value

    def has(self, column: str) -> bool:
        """Return whether the row has a column, or a field of a column, of this name."""
        try:
            self.value(column)
        except NoColumnError:
            return False
        return True

    def text(self, column: str) -> str:
        """Return the value of a column as text. Raises ValueError if it is missing, empty or neither text nor
        number."""
        return self._filled(self.value(column), column)

    def answer(self, column: str) -> str:
        """Return the known answer in a column as text. A list with one entry is replaced by this entry. Raises
        ValueError for any other list and for a mapping, which only a reward can read."""
        value = only_entry(self.value(column))
        if value and isinstance(value, list | tuple | Mapping):
            raise ValueError(
                f"{self.where}: column {column!r} is {shortened(repr(value))}; expected text or a number, or the "
                "setting answer: null and a reward that reads the column in prompt.row"
            )
        return self._filled(value, column)

    def optional_text(self, column: str) -> str | None:
        """Return the text in a column; None if the row lacks the column, or if the column is null or blank."""
        value = self.value(column) if self.has(column) else None
        if is_null(value) or (isinstance(value, str) and not value.strip()):
            return None
        return self._filled(value, column)

    def _filled(self, value: object, column: str) -> str:
        where = f"{self.where}: column {column!r}"
        content = stored_text(value, where)
        if not any(letter.isprintable() and not letter.isspace() for letter in content):  # U+200B, say, shows nothing
            raise ValueError(f"{where} is empty")
        if len(content) > MAX_TEXT:
            raise ValueError(f"{where} has {len(content)} characters; expected at most {MAX_TEXT}")
        return content

    def _names(self) -> Iterator[str]:
        """Yield the names of columns and, as ``COLUMN.FIELD``, those of the fields of a column."""
        for name, value in self.columns.items():
            yield name
            if isinstance(value, Mapping):
                yield from (f"{name}.{inner}" for inner in value)


def read_rows(
    path: str | Sequence[str],
    *,
    setting: str,
    split: str,
    subset: str | None = None,
    bad: Callable[[ValueError], None] = refuse,
) -> Iterator[Row]:
    """Read the rows of JSON Lines files, .parquet files or a data set of the Hugging Face hub, in order.

    Args:
        path: a file, a pattern of files such as ``data/*.parquet`` (read in the order of their names), the name of a
            data set on the hub (or the folder of a copy of one), or a list of these.
        setting: the source's setting that has the value ``path``, for error messages.
        split: split of a hub data set.
        subset: subset of a hub data set.
        bad: function that is called with the error if a row of a JSON Lines file cannot be read; the default raises the
            error.

    Raises:
        ValueError: the data cannot be read.
    """
    paths = [file for name in ([path] if isinstance(path, str) else path) for file in _named(name, setting)]
    if not paths:
        raise ValueError("the list of data files is empty; name at least one")
    first: dict[str, str] = {}
    for file in paths:
        if other := first.get(os.path.realpath(file)):
            as_other = "" if other == file else f" (also as {other})"
            raise ValueError(f"the data {file} is named twice{as_other}; its rows would count twice")
        first[os.path.realpath(file)] = file
    for file in paths:
        yield from _rows_of(file, split=split, subset=subset, bad=bad)


class BadRows:
    """Handler of errors of rows that cannot be used: "refuse" raises the first error, "drop" counts them."""

    def __init__(self, action: OnBadRows) -> None:
        if action not in ("refuse", "drop"):
            raise ValueError(f"bad_rows is {action!r}; expected 'refuse' or 'drop'")
        self.action = action
        self.num = 0
        self.first: ValueError | None = None

    def __call__(self, error: ValueError) -> None:
        if self.action == "refuse":
            if isinstance(error, NoColumnError):
                raise error
            raise ValueError(f"{error}. To leave such rows out, set bad_rows to drop") from error
        self.num += 1
        self.first = self.first or error

    def report(self, path: str | Sequence[str], *, num_good: int) -> None:
        """Log how many rows of ``path`` were dropped, and the first error. Raises ValueError if all rows were
        dropped."""
        if self.first is None:
            return
        if num_good == 0:
            raise ValueError(f"bad_rows drops all {self.num} rows of {path}; the first: {self.first}") from self.first
        rank_zero_info(
            f"data: dropped {self.num} of {self.num + num_good} rows of {path} that cannot be used; the first: "
            f"{self.first}"
        )


def read_problems(
    path: str,
    make: Callable[[Row], Problem],
    *,
    setting: str,
    bad_rows: OnBadRows,
    split: str,
    subset: str | None = None,
) -> list[Problem]:
    """Read the problems of a table, each made from a row by ``make``, which raises ValueError if the row cannot be
    used; ``bad_rows`` says whether such a row ends the program ("refuse") or is left out ("drop"). ``setting`` is the
    source's setting that has the value ``path``, for error messages."""
    bad, problems = BadRows(bad_rows), []
    for row in read_rows(path, setting=setting, split=split, subset=subset, bad=bad):
        try:
            problems.append(make(row))
        except ValueError as error:
            bad(error)
    bad.report(path, num_good=len(problems))
    return problems


def in_share(question: str, share: float) -> bool:
    """Return whether a question belongs to a fixed random ``share`` (0 to 1), by a hash of its text."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


def _named(path: str, setting: str) -> list[str]:
    """Return the files that match a pattern, sorted by name, or the path of a file or data set without a pattern. ``~``
    is expanded. Raises ValueError, with the name of the setting that has the path, if there is no such file."""
    path = os.path.expanduser(path)
    if not glob.has_magic(path) or Path(path).exists():
        if Path(path).suffix.lower() in (*JSON_LINES, ".parquet") and not Path(path).exists():
            raise ValueError(f"data.source: {setting}: there is no file {searched(path)}")
        return [path]
    files = sorted(file for file in glob.glob(path, recursive=True) if Path(file).is_file())
    if not files:
        raise ValueError(f"data.source: {setting}: no file matches {searched(path)}")
    return files


def _rows_of(path: str, *, split: str, subset: str | None, bad: Callable[[ValueError], None]) -> Iterator[Row]:
    suffix = Path(path).suffix.lower()
    if suffix in JSON_LINES:
        return (Row(where, columns) for where, columns in read_json_lines(path, bad, say=rank_zero_info))
    if suffix == ".parquet":
        return _parquet_rows(path)
    if Path(path).is_file():
        raise ValueError(
            f"data file {path} is of an unknown kind; expected .jsonl (a JSON object per line) or .parquet; "
            "docs/extending.md has a command that converts CSV files"
        )
    return _hub_rows(path, split=split, subset=subset)


def _parquet_rows(path: str) -> Iterator[Row]:
    from datamodules.arrow import parquet_rows  # pyarrow is heavy, and files of this kind are rare

    if not Path(path).is_file():
        raise ValueError(f"{path} is no file; name the files in a folder by a pattern, such as data/*.parquet")
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
            table = load_dataset(name, subset, split=split)  # runs no code of the data set's repository
    except Exception as error:  # the library uses other libraries to read files, each with its own kinds of errors
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"cannot load {name}: {reason}; a local .jsonl or .parquet file does as well") from error
    if len(table) == 0:
        raise ValueError(f"{name}, {split} has no rows")
    for number, columns in enumerate(dataset_rows(table)):
        yield Row(f"{name}, {split} row {number}", columns)
