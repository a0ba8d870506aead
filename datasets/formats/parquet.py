"""Parquet files that hold records, and images that are embedded in them.

Design: a row is an object, and any form may stand in it; a null is a key that is not there. A column of embedded
images, a struct with `bytes` or binary, is not read with the records: row 17's image has the path `train.parquet/17`,
as archives.py reads it. Lists of embedded images have no such path, and their bytes are read with their rows.

pyarrow takes long to import and is imported when the first such file is met.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lookonce.datasets.archives import image_columns
from lookonce.datasets.formats.checks import Row
from lookonce.datasets.formats.text_files import Named, Rows, encode
from lookonce.errors import ImageError, RecordsError

ROWS = 1024
"""Read at once."""
ROWS_WITH_BYTES = 16
JSON_COLUMN = "metadata"
"""Of canonical records: JSON as text, since a column has one type and metadata may be anything."""


def read_parquet(path: Path) -> Rows:
    """A record a row, counted from 0 as in the paths of embedded images.

    Raises:
        RecordsError: it is damaged, or has several columns of images and none is called `image`.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            columns = _Columns.of(file)
            if columns.embedded and path.suffix.lower() != ".parquet":
                raise RecordsError(f"{path}: its images can be read if its name ends in .parquet; rename it")
            for number, row in enumerate(_rows(file, columns)):
                if columns.embedded:
                    row["image"] = Path(os.path.abspath(path), str(number))
                elif columns.image and columns.image in row:
                    row["image"] = row.pop(columns.image)
                yield f"{path}: row {number}", _opened(row, f"{path}: row {number}")
    except ImageError as error:
        raise RecordsError(f"{path}: {error}") from None
    except ArrowException as error:
        raise RecordsError(f"can not read {path}: {str(error).partition(chr(10))[0]}; is it whole?") from None


class _Columns(NamedTuple):
    """What to read of a file."""

    names: list[str]
    image: str | None
    """The column of images, if there is one."""
    embedded: bool
    """Whether it holds bytes, and not only paths."""
    has_bytes: bool
    """Whether other columns do, in lists."""

    @classmethod
    def of(cls, file: Any) -> _Columns:
        schema = file.schema_arrow
        names, with_bytes = list(schema.names), [field.name for field in schema if "binary" in str(field.type)]
        if not any(_is_image(schema.field(name).type) for name in with_bytes):
            return cls(names, None, False, bool(with_bytes))
        bytes_column, path_column = image_columns(schema)
        image = bytes_column if path_column is None and bytes_column in names else bytes_column.removesuffix(".bytes")
        names.remove(image)
        with_bytes.remove(image)
        embedded = path_column is None or not _is_empty(file, bytes_column)
        return cls(names if embedded else [*names, str(path_column)], image, embedded, bool(with_bytes))


def _is_image(kind: Any) -> bool:
    """Whether a column of that type holds an image a row."""
    return str(kind) in ("binary", "large_binary") or (
        str(kind).startswith("struct") and kind.get_field_index("bytes") >= 0
    )


def _is_empty(file: Any, bytes_column: str) -> bool:
    """Whether the first row has no bytes: then the images lie beside the file, and it says where."""
    first = next(file.iter_batches(1, columns=[bytes_column]), None)
    return first is not None and (first.column(0)[0].as_py() or {}).get("bytes") is None


def _rows(file: Any, columns: _Columns) -> Iterator[Row]:
    num_rows = ROWS_WITH_BYTES if columns.has_bytes else ROWS
    for batch in file.iter_batches(num_rows, columns=columns.names):
        yield from (without_nulls(row) for row in batch.to_pylist())


def without_nulls(value: Any) -> Any:
    """A value without what is null in its objects, and with what JSON has no type for as text."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value if isinstance(value, str | int | float | bytes | None) else str(value)


def _opened(row: Row, origin: str) -> Row:
    if "turns" not in row or not isinstance(row.get(JSON_COLUMN), str):
        return row
    try:
        return row | {JSON_COLUMN: json.loads(row[JSON_COLUMN])}
    except ValueError as error:
        raise RecordsError(f"{origin}: its `{JSON_COLUMN}` is not JSON ({error})") from None


def write_parquet(path: Path, rows: Named) -> None:
    """A row a record, a column a key.

    Raises:
        RecordsError: values under one key have different types.
    """
    import pyarrow as pa
    from pyarrow import parquet

    closed = [_closed(row, name) for name, row in rows]
    columns = {}
    for key in dict.fromkeys(key for row in closed for key in row):
        try:
            columns[key] = pa.array([row.get(key) for row in closed])
            if "struct<>" in str(columns[key].type):
                raise TypeError("empty objects have none")
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise RecordsError(
                f"a column has one type, and the values under `{key}` have not ({error}); write JSONL, or canonical "
                "records, whose metadata may be anything"
            ) from None
    parquet.write_table(pa.table(columns), path, compression="zstd")


def _closed(row: Row, name: str) -> Row:
    if "turns" not in row or not isinstance(row.get(JSON_COLUMN), dict):
        return row
    return row | {JSON_COLUMN: encode(row[JSON_COLUMN], name).decode()}
