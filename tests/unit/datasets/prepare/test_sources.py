"""Every file format of a source gives the same records; images are found beside them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from webdataset import TarWriter

from lookonce.datasets import parquet as parquet_reader
from lookonce.datasets.prepare.definition import find_definition
from lookonce.datasets.prepare.run import Options, Prepared, prepare
from lookonce.datasets.prepare.sources import find_source
from lookonce.datasets.records import read_records
from lookonce.errors import ImageError, UsageError

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


IMAGES = {f"cl{number}": b"\xff\xd8\xff\xe0" + bytes([number]) * (1000 + number) for number in range(10)}


ROWS = [
    {"img_id": name, "source": "Polyps", "question": question, "answer": answer}
    for number, name in enumerate(IMAGES)
    for question, answer in [
        ("How many instrumnets are in the image?", "1"),
        ("Where in the image is the instrument?", "lower-rigth;center"),
        *(
            [("What type of polyp is present?", "paris ip"), ("What type of polyp is present?", "paris is")][
                number % 3 :
            ]
        ),
        *([("none", "nan")] if number == 4 else []),
    ]
]


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, data in IMAGES.items():
        (folder / f"{name}.jpg").write_bytes(data)


def in_parquet(folder: Path, **options) -> None:
    rows = [{"image": {"bytes": IMAGES[row["img_id"]], "path": None}} | row for row in ROWS]
    kinds = [(name, EMBEDDED if name == "image" else pa.string()) for name in rows[0]]
    (folder / "data").mkdir(parents=True)
    for number in range(3):
        some = rows[number * len(rows) // 3 : (number + 1) * len(rows) // 3]
        table = pa.Table.from_pylist(some, schema=pa.schema(kinds))
        parquet.write_table(table, folder / "data" / f"{number:05d}.parquet", **options)


def in_plain_binary(folder: Path) -> None:
    rows = [{"image": IMAGES[row["img_id"]]} | row for row in ROWS]
    folder.mkdir()
    parquet.write_table(pa.Table.from_pylist(rows), folder / "raw.parquet", compression="zstd", row_group_size=7)


def in_csv(folder: Path) -> None:
    write_images(folder / "images")
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8-sig") as file:
        lines = csv.DictWriter(file, ["source", "question", "answer", "img_id"])
        lines.writeheader()
        lines.writerows(ROWS)


def flat(row: dict) -> dict:
    """A row in flat format."""
    name = row["img_id"]
    rest = {key: row[key] for key in ("question", "answer", "source")}
    return {"image_id": name, "image_filename": f"{name}.jpg"} | rest


def in_jsonl(folder: Path) -> None:
    write_images(folder / "images")
    (folder / "all.jsonl").write_text("".join(json.dumps(flat(row)) + "\n\n" for row in ROWS))


def in_json(folder: Path) -> None:
    write_images(folder / "images")
    (folder / "all.json").write_text(json.dumps([flat(row) for row in ROWS], indent=1))


def in_zip(folder: Path) -> None:
    folder.mkdir()
    (folder / "all.json").write_text(json.dumps([flat(row) for row in ROWS]))
    with zipfile.ZipFile(folder / "images.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in IMAGES.items():
            archive.writestr(f"images/{name}.jpg", data)


def in_tar_of_images(folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(folder / "frames.tar", "w") as archive:
        for name, data in IMAGES.items():
            member = tarfile.TarInfo(f"{name}.jpg")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    rows = [flat(row) for row in ROWS]
    rows = [row | {"image_filename": f"frames.tar/{row['image_filename']}"} for row in rows]
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def in_webdataset(folder: Path, layout: str = "list") -> None:
    folder.mkdir()
    for part, names in enumerate((list(IMAGES)[:6], list(IMAGES)[6:])):
        with TarWriter(str(folder / f"{part:05d}.tar")) as writer:
            for name in names:
                rows = [{key: item for key, item in row.items()} for row in ROWS if row["img_id"] == name]
                value = rows if layout == "list" else {"source": "Polyps", "img_id": name, "qa": rows}
                writer.write({"__key__": name, "jpg": IMAGES[name], "json": value})


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "parquet": in_parquet,
    "parquet, dictionary": lambda folder: in_parquet(folder, dictionary_pagesize_limit=1 << 30, row_group_size=4),
    "parquet, plain binary": in_plain_binary,
    "CSV": in_csv,
    "JSONL": in_jsonl,
    "JSON": in_json,
    "JSON and zip": in_zip,
    "JSONL into a tar": in_tar_of_images,
    "WebDataset, a list": in_webdataset,
    "WebDataset, an object": lambda folder: in_webdataset(folder, "object"),
}


def made(folder: Path, source: Path, **options) -> Prepared:
    return prepare("kvasir-vqa", folder, Options(source=str(source), **options))


def content(prepared: Prepared) -> dict[str, bytes]:
    """All files but the report."""
    files = sorted(path for path in prepared.folder.rglob("*") if path.is_file() and path.name != "report.json")
    return {str(path.relative_to(prepared.folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    in_parquet(folder / "in")
    return content(made(folder / "out", folder / "in"))


@pytest.mark.guarantee("All sources of a dataset give the same records.")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_file_formats_give_the_same_records_and_image_files(tmp_path, layout, expected):
    LAYOUTS[layout](tmp_path / "in")
    prepared = made(tmp_path / "out", tmp_path / "in")
    assert content(prepared) == expected
    hashes = {hashlib.sha256(data).hexdigest() for data in IMAGES.values()}
    written = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out" / "images").iterdir()]
    assert len(written) == len(IMAGES) and set(written) == hashes
    assert prepared.report["rows"]["read"] == len(ROWS)


def test_a_source_may_be_one_file_with_images_elsewhere(tmp_path, expected):
    in_jsonl(tmp_path / "in")
    (tmp_path / "in" / "images").rename(tmp_path / "frames")
    prepared = made(tmp_path / "out", tmp_path / "in" / "all.jsonl", image_root=tmp_path / "frames")
    assert content(prepared) == expected


@pytest.mark.parametrize("image_rows", [1, 2, 7])
def test_any_number_of_rows_at_a_time_gives_the_same_records(tmp_path, monkeypatch, image_rows, expected):
    monkeypatch.setattr(parquet_reader, "IMAGE_ROWS", image_rows)
    LAYOUTS["parquet, dictionary"](tmp_path / "parquet")
    assert content(made(tmp_path / "a", tmp_path / "parquet")) == expected


def test_the_file_format_can_be_chosen_if_a_folder_has_several(tmp_path):
    in_csv(tmp_path / "in")
    (tmp_path / "in" / "some.jsonl").write_text("".join(json.dumps(flat(row)) + "\n" for row in ROWS[:3]))
    notes: list[str] = []
    options = Options(source=str(tmp_path / "in"), format="json")
    chosen = prepare("kvasir-vqa", tmp_path / "a", options, notes.append)
    assert chosen.report["rows"]["read"] == 3
    assert "reading 1 json file; ignored: metadata.csv (--format chooses)" in notes
    assert made(tmp_path / "b", tmp_path / "in").report["rows"]["read"] == len(ROWS)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["train.jsonl", "val.jsonl", "test.jsonl"], ["train", "val", "test"]),
        (["train/0.jsonl", "validation/0.jsonl", "test/0.jsonl"], ["train", "val", "test"]),
        (["set-train.jsonl", "set-dev.jsonl", "set-test.jsonl"], ["train", "val", "test"]),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"], ["train"]),
    ],
)
def test_file_names_say_the_official_split(tmp_path, names, parts):
    write_images(tmp_path / "in" / "images")
    for number, name in enumerate(names):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(json.dumps(flat(ROWS[5 * number])) + "\n")
    prepared = made(tmp_path / "out", tmp_path / "in", split="official")
    assert [path.stem for path in sorted((tmp_path / "out").glob("*.jsonl"))] == sorted(parts)
    assert prepared.report["split"]["by"] == "the set itself"


def test_a_split_column_takes_precedence_over_file_names(tmp_path):
    write_images(tmp_path / "in" / "images")
    rows = [flat(ROWS[0]) | {"split": "test"}, flat(ROWS[5])]
    (tmp_path / "in" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made(tmp_path / "out", tmp_path / "in", split="official")
    [record] = read_records(tmp_path / "out" / "test.jsonl")
    assert record.metadata["img_id"] == "cl0" and record.metadata["official_split"] == "test"


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 1):
        (tmp_path / f"rows_{number}.csv").write_text("question,answer\n")
    assert find_source(tmp_path, find_definition("kvasir-vqa")).files == ("rows_1.csv", "rows_9.csv", "rows_10.csv")


# Images that are not embedded.


def test_rows_without_their_image_are_left_out_counted_and_named(tmp_path):
    in_csv(tmp_path / "in")
    (tmp_path / "in" / "images" / "cl3.jpg").unlink()
    missing = sum(row["img_id"] == "cl3" for row in ROWS)
    report = made(tmp_path / "out", tmp_path / "in").report
    assert report["rows"]["left_out"]["no image"] == missing
    assert report["images"]["not_found"] == {"no image was found: cl3": missing}


def test_without_any_image_the_error_names_the_searched_paths(tmp_path):
    in_csv(tmp_path / "in")
    (tmp_path / "in" / "images").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ImageError, match=r"(?s)no row has an image; .*searched for .*images/\{image_id\}.jpg.*--image-root"
    ):
        made(tmp_path / "out", tmp_path / "in")


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/hostname", "images/../../secret.jpg", "a\0b.jpg"])
def test_a_name_that_leads_out_of_the_source_is_not_opened(tmp_path, name):
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    write_images(tmp_path / "in" / "images")
    row = {"image_filename": name, "question": "a", "answer": "b"}
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps(flat(ROWS[0])) + "\n" + json.dumps(row) + "\n")
    report = made(tmp_path / "out", tmp_path / "in").report
    assert report["rows"]["left_out"] == {"no image": 1} and report["images"]["written"] == 1


def test_an_unreadable_image_is_counted_with_the_reason(tmp_path):
    in_zip(tmp_path / "in")
    path = tmp_path / "in" / "images.zip"
    data = path.read_bytes()
    position = data.index(b"images/cl2.jpg") + 16
    path.write_bytes(data[:position] + b"\xff\xff" + data[position + 2 :])
    report = made(tmp_path / "out", tmp_path / "in").report
    [reason] = report["images"]["not_found"]
    assert "cannot read image" in reason and reason.endswith(": cl2")


def test_an_image_root_that_is_not_a_folder_is_refused(tmp_path):
    in_csv(tmp_path / "in")
    with pytest.raises(UsageError, match="--image-root .*gone is not a folder"):
        made(tmp_path / "out", tmp_path / "in", image_root=tmp_path / "gone")
