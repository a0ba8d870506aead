"""The rows of a parquet file, with or without images in them.

Design: Kvasir-VQA's files repeat an image in each of its rows, 15 GB in all. A repeated image is told by comparing it
with the last few, at memory's speed, and given as the same object, so nothing behind hashes or copies it again. A
portion that is done is not opened. In memory are a few rows' images, and what pyarrow needs for a page of them: 150 MB
for images of 240 kB in a dictionary, 500 MB where pages of eight megabytes are compressed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare import chunks as portions
from lookonce.datasets.prepare.chunks import BUFFER_BYTES, Portion, RawRow, broken
from lookonce.datasets.prepare.definition import Definition

BATCH_ROWS = 32
"""Decoded at once."""
NUM_RECENT = 4
"""Images that a row's is compared with."""


def read_parquet(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """Row groups, as many together as make a portion."""
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    except Exception as error:  # what pyarrow raises for damaged files has no base of its own
        raise broken(name, error) from None
    groups: list[int] = []
    first_row = num_rows = 0
    for group, size in enumerate(sizes):
        groups.append(group)
        num_rows += size
        if num_rows >= portions.PORTION_ROWS or group == len(sizes) - 1:
            read = partial(_read_groups, path, name, definition.columns.image, groups, first_row)
            yield Portion(f"{name}, row {first_row}", read, num_rows)
            groups, first_row, num_rows = [], first_row + num_rows, 0


def _read_groups(path: Path, name: str, image_names: list[str], groups: list[int], first_row: int) -> Iterator[RawRow]:
    from pyarrow.parquet import ParquetFile

    same = _Repeated()
    row = first_row
    with ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        embedded = _embedded_column(file.schema_arrow, image_names)
        batches = file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # as above
                raise broken(name, error) from None
            if batch is None:
                return
            images = _image_bytes(batch, embedded, same)
            plain = [column for column in batch.schema.names if column != embedded]
            for values, (image, image_path) in zip(batch.select(plain).to_pylist(), images, strict=True):
                if embedded:
                    values[embedded] = image_path
                yield RawRow(values, image, f"{name}/{row}")
                row += 1


def _embedded_column(schema: Any, names: Iterable[str]) -> str:
    """The column with images in it, or empty."""
    from pyarrow import types

    for name in names:
        if name in schema.names:
            kind = schema.field(name).type
            if types.is_binary(kind) or types.is_large_binary(kind):
                return name
            if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
                return name
    return ""


def _image_bytes(batch: Any, column: str, same: _Repeated) -> list[tuple[bytes | None, str | None]]:
    """Bytes and path of each row's image."""
    import pyarrow.compute as pc
    from pyarrow import types

    if not column:
        return [(None, None)] * batch.num_rows
    array = batch.column(column)
    if not types.is_struct(array.type):
        return [(same.bytes_of(value), None) for value in array]
    data = pc.struct_field(array, "bytes")
    has_path = array.type.get_field_index("path") >= 0
    paths = pc.struct_field(array, "path").to_pylist() if has_path else [None] * len(data)
    return [(same.bytes_of(value), path) for value, path in zip(data, paths, strict=True)]


class _Repeated:
    """Gives the same object for a buffer that equals one of the last few."""

    def __init__(self) -> None:
        self._recent: deque[tuple[Any, bytes]] = deque(maxlen=NUM_RECENT)

    def bytes_of(self, value: Any) -> bytes | None:
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
