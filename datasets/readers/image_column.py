"""The usual names of columns, and which column of a parquet file holds one image per row.

An image column is a struct with `bytes` and maybe `path`, as Hugging Face's Image feature writes it, or plain binary.
Other columns of bytes, such as masks, are not images of the question.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from lookonce.errors import ImageError
from lookonce.text import listed, one_line

IMAGE_NAMES = (
    *("image_filename", "file_name", "image_path", "image", "filename", "img", "img_path", "image_file", "img_file"),
    *("image_name", "img_name", "picture", "photo", "images"),
)
"""Names of the column with the image of a row, its file name or its bytes, or with a list of them."""
IMAGE_ID_NAMES = ("img_id", "image_id")
"""Names of the column with the dataset's name for the image, after which its file may be named."""
QUESTION_NAMES = ("question", "query", "problem", "prompt")
ANSWER_NAMES = ("answer", "answers", "label", "response", "solution", "output", "target", "ground_truth")
"""Names of the columns of a table of questions. Of each kind the first one counts that a row has."""
KEYS = {
    *IMAGE_NAMES,
    *IMAGE_ID_NAMES,
    *QUESTION_NAMES,
    *ANSWER_NAMES,
    "turns",
    "conversations",
    "messages",
    "instruction",
}
"""The keys by which records are recognised."""
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


def respelt(names: Iterable[str]) -> str:
    """What to say of names that are usual ones but for capitals, spaces and hyphens; empty if there are none."""
    usual = {name: re.sub(r"[\s-]+", "_", name.strip().lower()) for name in names if name not in KEYS}
    renamed = [f"`{one_line(name)}` to `{key}`" for name, key in usual.items() if key in KEYS]
    return f"; rename {listed(renamed)}" if renamed else ""


def image_columns(schema: Any) -> dict[str, ImageColumn]:
    """All columns with one image per row, by name.

    Raises:
        ImageError: two columns have the same name.
    """
    if len({*schema.names}) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise ImageError(f"two columns are called `{twice}`; rename one of them")
    found = (_as_image_column(field) for field in schema)
    return {column.name: column for column in found if column}


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
