"""The parquet reader: rows in batches, repeated images as one object, and the choice of the image column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lookonce.datasets.parquet import (
    ImageColumn,
    find_image_column,
    image_columns,
    open_parquet,
    read_rows,
    read_values,
    row_group_starts,
)
from lookonce.errors import ImageError

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NO_PATH = pa.struct([("bytes", pa.large_binary())])
ONLY_PATHS = pa.struct([("bytes", pa.null()), ("path", pa.string())])
NUM_ROWS = 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Five images, each in two rows; the last row has none. Row groups of four rows."""
    images: list[Any] = [{"bytes": f"image {n // 2}".encode(), "path": f"{n // 2}.jpg"} for n in range(NUM_ROWS - 1)]
    table = pa.table({"image": pa.array([*images, None], EMBEDDED), "question": [f"q{n}" for n in range(NUM_ROWS)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("num_rows", [1, 3, None])
def test_rows_come_with_bytes_and_path_of_their_image(path: Path, num_rows: int | None) -> None:
    with open_parquet(path) as file:
        rows = list(read_rows(file, image=find_image_column(file.schema_arrow), num_rows=num_rows))
    assert [row.values for row in rows] == [{"question": f"q{n}"} for n in range(NUM_ROWS)]
    assert [row.image for row in rows] == [*(f"image {n // 2}".encode() for n in range(NUM_ROWS - 1)), None]
    assert [row.image_path for row in rows] == [*(f"{n // 2}.jpg" for n in range(NUM_ROWS - 1)), None]


def test_a_repeated_image_is_the_same_object(path: Path) -> None:
    with open_parquet(path) as file:
        images = [row.image for row in read_rows(file, image=find_image_column(file.schema_arrow), num_rows=1)]
    assert all(images[n] is images[n + 1] for n in range(0, NUM_ROWS - 2, 2))


def test_row_groups_and_columns_are_read_alone(path: Path) -> None:
    with open_parquet(path) as file:
        assert row_group_starts(file) == [0, 4, 8, 10]
        assert [row.values for row in read_rows(file, ["question"], [2])] == [{"question": "q8"}, {"question": "q9"}]
        assert [value.as_py() for value in read_values(file, "image.path", 3, [0])][0] == {"path": "0.jpg"}
        assert [row.values for row in read_rows(file, [], [2])] == [{}, {}]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"a": EMBEDDED}, ImageColumn("a", True, True)),
        ({"a": NO_PATH}, ImageColumn("a", True, False)),
        ({"a": ONLY_PATHS}, ImageColumn("a", True, True)),
        ({"a": pa.binary(), "b": pa.string()}, ImageColumn("a", False, False)),
        ({"a": pa.large_binary(), "b": NO_PATH}, ImageColumn("b", True, False)),
        ({"a": EMBEDDED, "image": EMBEDDED}, ImageColumn("image", True, True)),
        ({"a": pa.binary(), "image": pa.binary()}, ImageColumn("image", False, False)),
        ({"a": pa.list_(EMBEDDED), "b": pa.struct([("bytes", pa.string())])}, None),
    ],
)
def test_the_image_column_is_found_by_type_and_name(columns: dict[str, Any], expected: ImageColumn | None) -> None:
    assert find_image_column(pa.schema(list(columns.items()))) == expected


def test_several_image_columns_without_the_name_image_are_refused() -> None:
    schema = pa.schema([("a", pa.binary()), ("b", pa.binary()), ("c", pa.string())])
    assert list(image_columns(schema)) == ["a", "b"]
    with pytest.raises(ImageError, match=r"expected one image column .*\['a', 'b', 'c'\]"):
        find_image_column(schema)


def test_fields_of_an_image_column_have_the_names_of_pyarrow() -> None:
    assert (ImageColumn("a", True, True).bytes_field, ImageColumn("a", True, True).path_field) == ("a.bytes", "a.path")
    assert (ImageColumn("a", False, False).bytes_field, ImageColumn("a", False, False).path_field) == ("a", None)
