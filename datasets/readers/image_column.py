"""Which column of a parquet file holds one image per row.

Such a column is a struct with `bytes` and maybe `path`, as Hugging Face's Image feature writes it, or plain binary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lookonce.errors import ImageError

MAX_IMAGE_BYTES = 1 << 30
"""The largest image file that is read, since a larger one could exhaust the memory."""


class ImageColumn(NamedTuple):
    """A column with one image per row."""

    name: str
    is_struct: bool
    has_path: bool

    @property
    def bytes_field(self) -> str:
        """The name under which pyarrow reads the bytes alone."""
        return f"{self.name}.bytes" if self.is_struct else self.name

    @property
    def path_field(self) -> str | None:
        return f"{self.name}.path" if self.has_path else None


def image_columns(schema: Any) -> dict[str, ImageColumn]:
    """All columns with one image per row, by name."""
    found = (_as_image_column(field) for field in schema)
    return {column.name: column for column in found if column}


def find_image_column(schema: Any) -> ImageColumn | None:
    """The image column, or None if there is none; structs are preferred to plain binary columns.

    Raises:
        ImageError: there are several and none is called `image`.
    """
    every = image_columns(schema)
    columns = {name: column for name, column in every.items() if column.is_struct} or every
    if "image" in columns:
        return columns["image"]
    if len(columns) > 1:
        raise ambiguous(schema)
    return next(iter(columns.values()), None)


def ambiguous(schema: Any) -> ImageError:
    """The error for a file that has no image column, or several."""
    return ImageError(
        "expected one image column (a struct with `bytes`, or binary), or several of which one is called `image`; "
        f"the columns are {schema.names}"
    )


def _as_image_column(field: Any) -> ImageColumn | None:
    from pyarrow import types

    if _is_binary(field.type):
        return ImageColumn(field.name, is_struct=False, has_path=False)
    if not types.is_struct(field.type) or (index := field.type.get_field_index("bytes")) < 0:
        return None
    kind = field.type.field(index).type
    if not (_is_binary(kind) or types.is_null(kind)):  # null: only paths are given
        return None
    return ImageColumn(field.name, is_struct=True, has_path=field.type.get_field_index("path") >= 0)


def _is_binary(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))
