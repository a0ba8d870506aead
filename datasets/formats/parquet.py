"""Parquet files that hold records, and images that are embedded in them.

Design: a row is an object in any record format; a null is a key that the object does not have. A column of embedded
images, a struct with `bytes` or binary, is not read with the records: the image of row 17 has the path
`train.parquet/17`, which archives.py reads. Lists of embedded images have no such path; their bytes are read with their
rows. Other columns of bytes, such as a mask, are left out, since metadata cannot hold bytes; `left_out_columns`
names them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from lookonce.datasets.formats.checks import Row
from lookonce.datasets.formats.text_files import Named, encode
from lookonce.datasets.readers.image_column import (
    IMAGE_NAMES,
    QUESTION_NAMES,
    ImageColumn,
    byte_columns,
    find_image_column,
)
from lookonce.datasets.readers.parquet import IMAGE_ROWS, TEXT_ROWS, open_parquet, read_rows, read_values
from lookonce.datasets.readers.text import Broken, Rows, refuse
from lookonce.errors import ImageError, RecordsError
from lookonce.files import parse_json
from lookonce.text import first_line

JSON_COLUMN = "metadata"
"""The column of canonical records that is JSON text: a column has one type, and metadata may have any."""
CONVERSATIONS = {"turns", "conversations", "messages", "instruction"}
"""One of these columns is in every format but that of tables."""
REFERRING: tuple[str, ...] = ("image", "images", "messages", "conversations")
"""The columns of these formats that may hold images among other values."""


def read_parquet(path: Path, broken: Broken = refuse) -> Rows:
    """A record per row, counted from 0 as in the paths of embedded images.

    Raises:
        RecordsError: the file is damaged, has several image columns without a usual name, or its questions are bytes.
    """
    try:
        with open_parquet(path) as file:
            columns = _Columns.of(file)
            if columns.is_embedded and path.suffix.lower() != ".parquet":
                raise RecordsError(f"{path}: its images can only be read if its name ends in .parquet; rename it")
            num_rows = IMAGE_ROWS if columns.has_lists_of_bytes else TEXT_ROWS
            for number, row in enumerate(read_rows(file, columns.names, num_rows=num_rows)):
                values = without_nulls(row.values)
                if columns.is_embedded:
                    values["image"] = Path(os.path.abspath(path), str(number))
                elif columns.image in values:
                    values["image"] = values.pop(columns.image)
                origin = f"{path}: row {number}"
                try:
                    values = _opened(values, origin)
                except RecordsError as error:
                    broken(origin, error)
                else:
                    yield origin, values
    except ImageError as error:
        raise RecordsError(f"{path}: {error}") from None
    except (RecordsError, FileNotFoundError, PermissionError, ImportError):
        raise
    except Exception as error:  # the errors of pyarrow for damaged files have no common base
        raise RecordsError(f"cannot read {path}: {first_line(error)}; is it complete?") from None


def left_out_columns(path: Path) -> list[str]:
    """The columns of bytes that are not read, since they hold no images of the records; none of a damaged file."""
    with contextlib.suppress(Exception), open_parquet(path) as file:  # it is reported when records are read
        columns = _Columns.of(file)
        return [name for name in file.schema_arrow.names if name not in (*columns.names, columns.image)]
    return []


class _Columns(NamedTuple):
    """Which columns of a file to read."""

    names: list[str]
    image: str | None
    """The image column, if there is one."""
    is_embedded: bool
    """Whether the image column holds bytes, not only paths."""
    has_lists_of_bytes: bool
    """Whether other columns hold bytes, in lists."""

    @classmethod
    def of(cls, file: Any) -> _Columns:
        schema, image = file.schema_arrow, find_image_column(file.schema_arrow)
        name, of_bytes = image and image.name, byte_columns(schema)
        referring: tuple[str, ...] = REFERRING
        if not CONVERSATIONS & {*schema.names}:  # a table, whose images may be in lists
            question = next((one for one in QUESTION_NAMES if one in schema.names), "")
            if question in of_bytes:
                raise ImageError(f"the column `{question}` holds bytes; expected texts")
            referring = tuple(one for one in IMAGE_NAMES if one in schema.names)[: 0 if image else 1]
        names = [field.name for field in schema if field.name != name]
        names = [one for one in names if one not in of_bytes or one in referring]
        has_lists = any(one in of_bytes for one in names)
        if image is None or not image.path_field or not _is_empty(file, image):
            return cls(names, name, image is not None, has_lists)
        return cls([*names, image.path_field], name, False, has_lists)


def _is_empty(file: Any, image: ImageColumn) -> bool:
    """Whether the first row has no bytes: then the images lie beside the file, at the paths in this column."""
    first = next(read_values(file, image.bytes_field, 1), None)
    return first is not None and (first.as_py() or {}).get("bytes") is None


def without_nulls(value: Any) -> Any:
    """A value without the nulls in its objects; values without a JSON type become text."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value if isinstance(value, str | int | float | bytes | None) else str(value)


def _opened(row: Row, origin: str) -> Row:
    if "turns" not in row or not isinstance(row.get(JSON_COLUMN), str):
        return row
    try:
        return row | {JSON_COLUMN: parse_json(row[JSON_COLUMN])}
    except ValueError as error:
        raise RecordsError(f"{origin}: its `{JSON_COLUMN}` is not JSON ({error})") from None


def write_parquet(path: Path, rows: Named) -> None:
    """One row per record, one column per key.

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
                raise TypeError("empty objects have no type")
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise RecordsError(
                f"the values under `{key}` have different types, and a parquet column has one ({error}); write JSONL, "
                "or canonical records, whose metadata may have any type"
            ) from None
    with path.open("wb") as file:  # pyarrow would remove a file that it has opened, and how much was written is unknown
        parquet.write_table(pa.table(columns), file, compression="zstd")


def _closed(row: Row, name: str) -> Row:
    if "turns" not in row or not isinstance(row.get(JSON_COLUMN), dict):
        return row
    return row | {JSON_COLUMN: encode(row[JSON_COLUMN], name).decode()}
