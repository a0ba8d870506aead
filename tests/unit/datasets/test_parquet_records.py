"""Records in parquet files: rows in any format, embedded images, and lists of them, which have no path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lookonce.datasets.images import image_key, read_bytes
from lookonce.datasets.records import RecordsFile, Turn, read_records
from lookonce.errors import RecordsError

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TURN = (Turn("Is there text?", "yes"),)


def write(path: Path, types: dict[str, Any] | None = None, **columns: list[Any]) -> Path:
    arrays = {name: pa.array(values, (types or {}).get(name)) for name, values in columns.items()}
    parquet.write_table(pa.table(arrays), path, row_group_size=2)
    return path


def questions(number: int) -> dict[str, list[str]]:
    return {"question": ["Is there text?"] * number, "answer": ["yes"] * number}


def test_embedded_images_have_the_path_of_their_row(tmp_path: Path) -> None:
    """The columns of Kvasir-VQA on the Hub."""
    images = [{"bytes": f"image {n}".encode(), "path": "a.jpg"} for n in range(5)]
    path = write(
        tmp_path / "raw-0000.parquet",
        {"image": IMAGE},
        image=images,
        source=["polyps"] * 4 + [None],
        **questions(5),
        img_id=[f"id{n}" for n in range(5)],
    )
    records = read_records(path)
    assert [record.images for record in records] == [(path / str(n),) for n in range(5)]
    assert [read_bytes(record.images[0]) for record in records] == [image["bytes"] for image in images]
    assert all(record.turns == TURN for record in records)
    assert records[0].metadata == {"source": "polyps", "img_id": "id0"} and records[4].metadata == {"img_id": "id4"}
    assert records[3].origin == f"{path}: row 3"


def test_paths_of_embedded_images_do_not_depend_on_the_image_root(tmp_path: Path) -> None:
    image = [{"bytes": b"x", "path": None}]
    path = write(tmp_path / "raw.parquet", {"image": IMAGE}, image=image, **questions(1))
    [record] = read_records(path, tmp_path / "elsewhere")
    assert record.images == (path / "0",) and image_key(record.images[0])


def test_the_only_binary_column_is_the_image(tmp_path: Path) -> None:
    path = write(tmp_path / "raw.parquet", {"picture": pa.binary()}, picture=[b"x", b"y"], **questions(2))
    assert [read_bytes(record.images[0]) for record in read_records(path)] == [b"x", b"y"]


def test_images_that_are_only_named_are_beside_the_file(tmp_path: Path) -> None:
    image = [{"bytes": None, "path": "images/a.jpg"}]
    path = write(tmp_path / "raw.parquet", {"picture": IMAGE}, picture=image, **questions(1))
    assert read_records(path)[0].images == (tmp_path / "images" / "a.jpg",)


@pytest.mark.parametrize("format", ["messages", "parts", "llava"])
def test_conversations_in_columns_have_the_embedded_image(tmp_path: Path, format: str) -> None:
    content: Any = "<image>Is there text?"
    if format == "parts":
        content = [{"type": "image", "text": None}, {"type": "text", "text": "Is there text?"}]
    answer = [{"type": "text", "text": "yes"}] if format == "parts" else "yes"
    columns: dict[str, list[Any]] = {
        "messages": [[{"role": "user", "content": content}, {"role": "assistant", "content": answer}]]
    }
    if format == "llava":
        columns = {"conversations": [[{"from": "human", "value": content}, {"from": "gpt", "value": answer}]]}
    path = write(tmp_path / "x.parquet", {"image": IMAGE}, image=[{"bytes": b"x", "path": None}], **columns)
    [record] = read_records(path)
    assert (record.images, record.turns) == ((path / "0",), TURN)


def test_lists_of_embedded_images_are_refused_with_the_command_that_extracts_them(tmp_path: Path) -> None:
    """The columns of the datasets of TRL and LLaMA-Factory."""
    path = write(
        tmp_path / "x.parquet",
        {"images": pa.list_(IMAGE)},
        images=[[{"bytes": b"x", "path": None}, {"bytes": b"y", "path": None}]],
        messages=[[{"role": "user", "content": "Is there text?"}, {"role": "assistant", "content": "yes"}]],
    )
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}: row 0: the image is embedded in the record")
    assert f"lookonce data convert {path} OUT.jsonl" in str(refusal.value)
    kept: list[bytes] = []

    def keep(data: bytes) -> Path:
        kept.append(data)
        return tmp_path / data.decode()

    [record] = RecordsFile(path, keep=keep)
    assert (record.images, kept) == ((tmp_path / "x", tmp_path / "y"), [b"x", b"y"])


def test_nulls_are_missing_keys_and_times_are_texts(tmp_path: Path) -> None:
    stamp = pa.array([0], pa.timestamp("s"))
    table = {"image_filename": pa.array(["a.jpg"]), "a": pa.array([None], pa.string()), "t": stamp}
    parquet.write_table(pa.table(table | {k: pa.array(v) for k, v in questions(1).items()}), tmp_path / "x.parquet")
    assert read_records(tmp_path / "x.parquet")[0].metadata == {"t": "1970-01-01 00:00:00"}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", image_filename=["a.jpg"] * 3, **questions(3))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RecordsError, match="cannot read .*x.parquet: .*; is it complete"):
        read_records(path)


def test_a_parquet_file_is_recognised_by_its_content(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", image_filename=["a.jpg"], **questions(1)).rename(tmp_path / "x.data")
    assert read_records(path)[0].turns == TURN


def test_an_embedded_image_takes_precedence_over_a_file_name(tmp_path: Path) -> None:
    image, name = [{"bytes": b"x", "path": None}], ["frame-1.jpg"]
    path = write(tmp_path / "x.parquet", {"image": IMAGE}, file_name=name, image=image, **questions(1))
    [record] = read_records(path)
    assert (record.images, record.metadata) == ((path / "0",), {"file_name": "frame-1.jpg"})
    with pytest.raises(RecordsError, match="its images can only be read if its name ends in .parquet; rename it"):
        read_records(path.rename(tmp_path / "x.data"))


def test_two_columns_of_images_are_refused_with_their_names(tmp_path: Path) -> None:
    images = {name: [{"bytes": b"x", "path": None}] for name in ("before", "after")}
    path = write(tmp_path / "x.parquet", dict.fromkeys(images, IMAGE), **images, **questions(1))
    with pytest.raises(RecordsError, match=r"x.parquet: expected one image column .*'before', 'after'"):
        read_records(path)


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "x.json", "x.jsonl"])
def test_no_rows_are_no_records(tmp_path: Path, name: str) -> None:
    write(tmp_path / "x.parquet", {"question": pa.string()}, question=[])
    (tmp_path / "x.csv").write_text("question,answer\n")
    (tmp_path / "x.json").write_text(" [ ] ")
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(RecordsError, match=f"{name} has no records; expected one JSON object per line"):
        read_records(tmp_path / name)
