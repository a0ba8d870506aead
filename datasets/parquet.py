"""Parquet files: rows in small batches, the images that are embedded in them, and the records that they hold.

Design: an image column is a struct with `bytes` and maybe `path`, as Hugging Face's Image feature writes it, or plain
binary.

A few rows are decoded at a time on one thread, since a row group of images may not fit in memory. Kvasir-VQA's files
repeat an image in each of its rows, 15 GB in all. A repeated image is recognised by comparing it with the last few, at
memory speed, and returned as the same object, so no caller hashes or copies it again. pyarrow needs 150 MB for a page
of images of 240 kB in a dictionary, and 500 MB where pages of eight megabytes are compressed.

A file of a few kilobytes may say that each of a million rows has the same text of many megabytes. So fewer rows are
decoded at once where a column is large, and a batch that became too large is refused before Python makes objects of it.

A row of records is an object in any record format; a null is a key that the object does not have. A column of embedded
images is not read with the records: the image of row 17 has the path `train.parquet/17`, which archives.py reads. Lists
of embedded images are read with their rows. Other columns of bytes, such as masks, are left out.

pyarrow is slow to import, and imported when the first file is opened.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lookonce.datasets.formats.record import CONVERSATION_NAMES, IMAGE_NAMES, QUESTION_NAMES, Row
from lookonce.datasets.text_files import Broken, Named, Rows, encode, refuse
from lookonce.errors import ImageError, RecordsError
from lookonce.files import parse_json
from lookonce.text import first_line

MAX_IMAGE_BYTES = 1 << 30
"""The largest image file that is read, since a larger one could exhaust the memory."""


class ImageColumn(NamedTuple):
    """A column with one image per row."""

    name: str
    bytes_field: str
    """The name under which pyarrow reads the bytes alone."""
    path_field: str | None = None

    @property
    def is_struct(self) -> bool:
        return self.bytes_field != self.name


def image_columns(schema: Any) -> dict[str, ImageColumn]:
    """All columns with one image per row, by name; raises ImageError if two columns have the same name."""
    if len({*schema.names}) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise ImageError(f"two columns are called `{twice}`; rename one of them")
    columns = (_as_image_column(field) for field in schema)
    return {column.name: column for column in columns if column}


def find_image_column(schema: Any) -> ImageColumn | None:
    """The column with the embedded image of a row, or None if there is none, or if another column names its file.

    A column with a usual name is preferred to others, and a struct to plain binary.

    Raises:
        ImageError: there are several, none of which has a usual name.
    """
    every = image_columns(schema)
    structs = {name: column for name, column in every.items() if column.is_struct}
    for columns in (structs, every):
        if name := next((name for name in ("image", *IMAGE_NAMES) if name in columns), None):
            return columns[name]
    if any(name in schema.names for name in IMAGE_NAMES):
        return None
    columns = structs or every
    if len(columns) > 1:
        raise ambiguous(schema)
    return next(iter(columns.values()), None)


def byte_columns(schema: Any) -> list[str]:
    """The names of all columns that hold bytes, at any depth."""
    return [field.name for field in schema if "binary" in str(field.type)]


def ambiguous(schema: Any) -> ImageError:
    """The error for a file that has no image column, or several."""
    return ImageError(
        "expected one image column (a struct with `bytes`, or binary), or several of which one is called `image`; "
        f"the columns are {schema.names}; leave the others out, or call the one with the images `image`"
    )


def _as_image_column(field: Any) -> ImageColumn | None:
    from pyarrow import types

    if _is_binary(field.type):
        return ImageColumn(field.name, field.name)
    if not types.is_struct(field.type) or (index := field.type.get_field_index("bytes")) < 0:
        return None
    kind = field.type.field(index).type
    if not (_is_binary(kind) or types.is_null(kind)):  # null: only paths are given
        return None
    has_path = field.type.get_field_index("path") >= 0
    return ImageColumn(field.name, f"{field.name}.bytes", f"{field.name}.path" if has_path else None)


def _is_binary(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


BUFFER_BYTES = 1 << 20
TEXT_ROWS = 1024
"""Rows without images that are decoded at once."""
IMAGE_ROWS = 8
"""Rows with images that are decoded at once; 64 were slower (15.5 s where 8 took 9.5)."""
NUM_RECENT = 4
"""How many images the next one is compared with."""
MAX_VALUES = 1 << 24
"""The most values of the rows that are decoded at once; a million empty ones take some bytes on the disk."""
MAX_BATCH_BYTES = 1 << 28
"""The most bytes of the rows that are decoded at once, apart from images, of which there are `IMAGE_ROWS`."""


class ParquetRow(NamedTuple):
    """One row; image and path are those of the image column, which is not among the values."""

    values: dict[str, Any]
    image: bytes | None
    image_path: str | None


def open_parquet(path: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)


def read_rows(
    file: Any, columns: Sequence[str], image: ImageColumn | None = None, num_rows: int = IMAGE_ROWS
) -> Iterator[ParquetRow]:
    """The rows, `num_rows` decoded at a time; `image` is the column to read as bytes."""
    recent: deque[tuple[Any, bytes]] = deque(maxlen=NUM_RECENT)
    for batch in _batches(file, columns, None, num_rows):
        plain = [name for name in batch.schema.names if image is None or name != image.name]
        images = _images_of(batch.column(image.name), image, recent) if image else [(None, None)] * batch.num_rows
        for values, (data, path) in zip(batch.select(plain).to_pylist(), images, strict=True):
            yield ParquetRow(values, data, path)


def read_values(file: Any, column: str, num_rows: int, groups: Sequence[int] | None = None) -> Iterator[Any]:
    """The values of one column as pyarrow's scalars, which copy nothing until asked."""
    for batch in _batches(file, [column], groups, num_rows):
        yield from batch.column(0)


def _batches(file: Any, columns: Sequence[str], groups: Sequence[int] | None, num_rows: int) -> Iterator[Any]:
    # No value is longer than its row group, by the file's own account. What the file says of single columns is not
    # asked for: if that is damaged, pyarrow ends the process.
    sizes = (file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups))
    num_rows = min(num_rows, max(IMAGE_ROWS, MAX_BATCH_BYTES // max((1, *sizes))))
    limit = IMAGE_ROWS * MAX_IMAGE_BYTES if num_rows <= IMAGE_ROWS else MAX_BATCH_BYTES
    for batch in file.iter_batches(num_rows, row_groups=groups, columns=columns, use_threads=False):
        if batch.nbytes > limit or sum(map(_num_values, batch.columns)) > MAX_VALUES:
            raise ValueError(f"{batch.num_rows} of its rows have more than {limit:,} bytes or {MAX_VALUES:,} values")
        yield batch


def _num_values(array: Any) -> int:
    """How many objects Python would make of an array, apart from those within images."""
    from pyarrow import types

    kind, inner = array.type, []
    if types.is_struct(kind):
        inner = [array.field(number) for number in range(kind.num_fields)]
    elif types.is_nested(kind) and hasattr(array, "flatten"):
        inner = [array.flatten()]
    return len(array) + sum(map(_num_values, inner))


def _images_of(
    array: Any, column: ImageColumn, recent: deque[tuple[Any, bytes]]
) -> list[tuple[bytes | None, str | None]]:
    """Bytes and path of each row's image; `recent` ones are the same bytes objects again."""
    import pyarrow.compute as pc
    from pyarrow import py_buffer

    def bytes_of(value: Any) -> bytes | None:
        if not value.is_valid:
            return None
        buffer = value.as_buffer()
        for known, data in recent:
            if known.equals(buffer):
                return data
        data = bytes(buffer)
        recent.appendleft((py_buffer(data), data))
        return data

    data = pc.struct_field(array, "bytes") if column.is_struct else array
    paths = pc.struct_field(array, "path").to_pylist() if column.path_field else [None] * len(array)
    return [(bytes_of(value), path) for value, path in zip(data, paths, strict=True)]


JSON_COLUMN = "metadata"
"""The column of canonical records that is JSON text: a column has one type, and metadata may have any."""
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
            if columns.embedded and path.suffix.lower() != ".parquet":
                raise RecordsError(f"{path}: its images can only be read if its name ends in .parquet; rename it")
            num_rows = IMAGE_ROWS if columns.has_lists_of_bytes else TEXT_ROWS
            for number, row in enumerate(read_rows(file, columns.names, num_rows=num_rows)):
                values = without_nulls(row.values)
                image = values.pop(columns.image, None)
                if columns.embedded is True or (columns.embedded and columns.embedded[number]):
                    image = Path(os.path.abspath(path), str(number))
                if image:
                    values["image"] = image
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
    names: list[str]
    image: str | None
    embedded: bool | list[bool]
    """Whether the image column holds bytes, not only paths; of each row, if the first one has none."""
    has_lists_of_bytes: bool
    """Whether other columns hold bytes, in lists."""

    @classmethod
    def of(cls, file: Any) -> _Columns:
        schema, image = file.schema_arrow, find_image_column(file.schema_arrow)
        name, of_bytes = image and image.name, byte_columns(schema)
        referring: tuple[str, ...] = REFERRING
        if not {*CONVERSATION_NAMES} & {*schema.names}:  # a table, whose images may be in lists
            question = next((column for column in QUESTION_NAMES if column in schema.names), "")
            if question in of_bytes:
                raise ImageError(f"the column `{question}` holds bytes; expected texts")
            referring = tuple(column for column in IMAGE_NAMES if column in schema.names)[: 0 if image else 1]
        names = [field.name for field in schema if field.name != name]
        names = [column for column in names if column not in of_bytes or column in referring]
        has_lists = any(column in of_bytes for column in names)
        if image is None or not image.path_field or next(_has_bytes(file, image, 1), True):
            return cls(names, name, image is not None, has_lists)
        embedded = [*_has_bytes(file, image, TEXT_ROWS)]
        return cls([*names, image.path_field], name, any(embedded) and embedded, has_lists)


def _has_bytes(file: Any, image: ImageColumn, num_rows: int) -> Iterator[bool]:
    """Whether each row has the bytes of its image; else the image is the file at the row's path, if it has one."""
    for value in read_values(file, image.bytes_field, num_rows):
        yield value.is_valid and value["bytes"].is_valid and value["bytes"].as_buffer().size > 0


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
    """One row per record, one column per key; raises RecordsError if values under one key have different types."""
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
