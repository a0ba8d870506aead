"""Parquet files: rows in small batches, and the images that are embedded in them.

Design: a few rows are decoded at a time on one thread, since a row group of images may not fit in memory. Kvasir-VQA's
files repeat an image in each of its rows, 15 GB in all. A repeated image is recognised by comparing it with the last
few, at memory speed, and returned as the same object, so no caller hashes or copies it again. Memory: the images of a
few rows, and what pyarrow needs for a page of them: 150 MB for images of 240 kB in a dictionary, 500 MB where pages of
eight megabytes are compressed.

A file of a few kilobytes may say that each of a million rows has the same text of many megabytes. So fewer rows are
decoded at once where a column is large, and a batch that became too large is refused before Python makes objects of it.

pyarrow takes long to import and is imported when the first file is opened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from lookonce.datasets.readers.image_column import MAX_IMAGE_BYTES, ImageColumn

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
    """The opened file, a context manager."""
    from pyarrow.parquet import ParquetFile

    return ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)


def row_group_starts(file: Any) -> list[int]:
    """The first row of each row group, and at the end the number of rows."""
    sizes = (file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
    return list(accumulate(sizes, initial=0))


def read_rows(
    file: Any,
    columns: Sequence[str] | None = None,
    groups: Sequence[int] | None = None,
    image: ImageColumn | None = None,
    num_rows: int | None = None,
) -> Iterator[ParquetRow]:
    """The rows of some row groups, `num_rows` decoded at a time; `image` is the column to read as bytes."""
    recent = _RecentImages()
    for batch in _batches(file, columns, groups, num_rows or IMAGE_ROWS):
        plain = [name for name in batch.schema.names if image is None or name != image.name]
        images = recent.read(batch.column(image.name), image) if image else [(None, None)] * batch.num_rows
        for values, (data, path) in zip(batch.select(plain).to_pylist(), images, strict=True):
            yield ParquetRow(values, data, path)


def read_values(file: Any, column: str, num_rows: int, groups: Sequence[int] | None = None) -> Iterator[Any]:
    """The values of one column as pyarrow's scalars, which copy nothing until asked."""
    for batch in _batches(file, [column], groups, num_rows):
        yield from batch.column(0)


def _batches(file: Any, columns: Sequence[str] | None, groups: Sequence[int] | None, num_rows: int) -> Iterator[Any]:
    num_rows = min(num_rows, max(IMAGE_ROWS, MAX_BATCH_BYTES // max(_largest_row_group(file), 1)))
    limit = IMAGE_ROWS * MAX_IMAGE_BYTES if num_rows <= IMAGE_ROWS else MAX_BATCH_BYTES
    for batch in file.iter_batches(num_rows, row_groups=groups, columns=columns, use_threads=False):
        if batch.nbytes > limit or sum(map(_num_values, batch.columns)) > MAX_VALUES:
            raise ValueError(f"{batch.num_rows} of its rows have more than {limit:,} bytes or {MAX_VALUES:,} values")
        yield batch


def _largest_row_group(file: Any) -> int:
    """The most bytes of a row group, by the file's own account: no value in it is longer.

    What the file says of single columns is not asked for: if that is damaged, pyarrow ends the process.
    """
    groups = (file.metadata.row_group(number) for number in range(file.metadata.num_row_groups))
    return max((group.total_byte_size for group in groups), default=0)


def _num_values(array: Any) -> int:
    """How many objects Python would make of an array, apart from those within images."""
    from pyarrow import types

    kind, inner = array.type, []
    if types.is_struct(kind):
        inner = [array.field(number) for number in range(kind.num_fields)]
    elif types.is_nested(kind) and hasattr(array, "flatten"):
        inner = [array.flatten()]
    return len(array) + sum(map(_num_values, inner))


class _RecentImages:
    """Returns the same bytes object for an image that equals one of the last few."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Any, bytes]] = deque(maxlen=NUM_RECENT)

    def read(self, array: Any, column: ImageColumn) -> list[tuple[bytes | None, str | None]]:
        """Bytes and path of each row's image."""
        import pyarrow.compute as pc

        if not column.is_struct:
            return [(self._bytes_of(value), None) for value in array]
        data = pc.struct_field(array, "bytes")
        paths = pc.struct_field(array, "path").to_pylist() if column.has_path else [None] * len(data)
        return [(self._bytes_of(value), path) for value, path in zip(data, paths, strict=True)]

    def _bytes_of(self, value: Any) -> bytes | None:
        from pyarrow import py_buffer

        if not value.is_valid:
            return None
        buffer = value.as_buffer()
        for known, data in self._recent:
            if known.equals(buffer):
                return data
        data = bytes(buffer)
        self._recent.appendleft((py_buffer(data), data))
        return data
