"""Read rows of Arrow tables: Parquet files and data sets of the Hugging Face hub."""

from collections.abc import Iterator
from typing import Any

import pyarrow
from pyarrow import parquet, types

ROWS = 1024  # rows that are converted at a time


def parquet_rows(path: str) -> Iterator[dict[str, object]]:
    """Read the rows of a Parquet file as dicts. Raises ValueError if it is damaged or empty, or two columns have one
    name."""
    try:
        with parquet.ParquetFile(path) as file:
            if file.metadata.num_rows == 0:
                raise ValueError(f"data file {path} has no rows")
            names = file.schema_arrow.names
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise ValueError(f"the table has several columns {repeated!r}; rename all but one")
            for batch in file.iter_batches(ROWS):
                yield from table_rows(pyarrow.Table.from_batches([batch]))
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"data file {path} cannot be read as Parquet: {reason}") from error


def dataset_rows(dataset: Any) -> Iterator[dict[str, object]]:
    """Return the rows of a ``datasets.Dataset`` as dicts; a class label is given as its name and not as its number."""
    for table in dataset.with_format("arrow").iter(ROWS):
        for row in table_rows(table):
            yield {name: _with_labels(value, dataset.features[name]) for name, value in row.items()}


def _with_labels(value: Any, feature: Any) -> Any:
    """Replace numbers of class labels, also inside lists and structs, by their names; -1, no label, becomes None."""
    if hasattr(feature, "int2str"):
        return feature.names[value] if isinstance(value, int) and value >= 0 else None
    if isinstance(value, dict) and isinstance(feature, dict):
        return {name: _with_labels(field, feature[name]) for name, field in value.items()}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and inner is not None:
        return [_with_labels(entry, inner) for entry in value]
    return value


def table_rows(table: pyarrow.Table) -> Iterator[dict[str, object]]:
    """Return the rows of an Arrow table as dicts of Python objects. A 16- or 32-bit float, also in a list, becomes the
    Python float with the shortest digits that identify it in its own precision: 0.1 and not 0.10000000149011612. A
    column with times that Python cannot represent becomes text."""
    for row in zip(*map(_values, table.columns), strict=True):
        yield dict(zip(table.column_names, row, strict=True))


def _values(column: pyarrow.ChunkedArray) -> list[Any]:
    try:
        values = column.to_pylist()
    except (ValueError, OverflowError):  # nanoseconds, or a year after 9999
        values = column.cast(pyarrow.string()).to_pylist()
    return [_as_printed(value, column.type) for value in values] if _has_short_float(column.type) else values


def _inner(kind: pyarrow.DataType) -> list[pyarrow.DataType]:
    """Return the types that a type is composed of."""
    if types.is_dictionary(kind):
        return [kind.value_type]
    if isinstance(kind, pyarrow.BaseExtensionType):
        return [kind.storage_type]
    return [kind.field(index).type for index in range(kind.num_fields)]


def _has_short_float(kind: pyarrow.DataType) -> bool:
    return types.is_float16(kind) or types.is_float32(kind) or any(map(_has_short_float, _inner(kind)))


def _as_printed(value: Any, kind: pyarrow.DataType) -> Any:
    if value is None:
        return None
    if types.is_float16(kind) or types.is_float32(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    inner = _inner(kind)
    if types.is_struct(kind):
        return {name: _as_printed(field, part) for (name, field), part in zip(value.items(), inner, strict=True)}
    if types.is_map(kind):
        pair = inner[0]
        return [(_as_printed(k, pair.field(0).type), _as_printed(v, pair.field(1).type)) for k, v in value]
    if isinstance(value, list):
        return [_as_printed(entry, inner[0]) for entry in value]
    return _as_printed(value, inner[0]) if inner else value
