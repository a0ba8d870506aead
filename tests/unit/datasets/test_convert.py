"""`lookonce data convert`: the same records in another format, the paths of their images, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result
from PIL import Image
from pyarrow import parquet
from support.rows import EMBEDDED as STRUCT
from support.rows import alternating, encoded, write_lines
from support.rows import run as run_command

from lookonce.datasets.images import read_bytes
from lookonce.datasets.records import read_records


def run(*words: object) -> Result:
    return run_command("data", "convert", *words)


def picture(format: str = "PNG", color: int = 0) -> bytes:
    return encoded(Image.frombytes("L", (16, 16), bytes((color + 7 * n) % 256 for n in range(256))), format)


def asked(**values: Any) -> dict[str, Any]:
    return {"messages": alternating("Is there text?", "yes")} | values


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with records in ms-swift's format and their images."""
    for name in ("a.png", "b.png"):
        (tmp_path / "data" / "images").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / "images" / name).write_bytes(picture(color=ord(name[0])))
    rows = [asked(images=[f"images/{name}"], source="polyps") for name in ("a.png", "b.png")]
    write_lines(tmp_path / "data" / "train.jsonl", *rows)
    return tmp_path / "data"


def without_origin(path: Path, *root: Path) -> list[tuple[Any, ...]]:
    records = read_records(path, *root)
    return [(record.images, record.turns, record.system, record.metadata) for record in records]


def names(path: Path) -> list[str]:
    return [json.loads(line)["images"][0] for line in path.read_text().splitlines()]


def test_image_paths_are_relative_to_the_new_file(data):
    root, source = data.parent, data / "train.jsonl"
    expected = {"data/out.jsonl": "images/", "out.jsonl": "data/images/", "other/out.jsonl": f"{data}/images/"}
    for name, folder in expected.items():
        assert run(source, root / name).exit_code == 0
        assert names(root / name) == [f"{folder}a.png", f"{folder}b.png"]
    assert run(source, root / "rooted.jsonl", "--out-image-root", data / "images").exit_code == 0
    assert names(root / "rooted.jsonl") == ["a.png", "b.png"]
    assert without_origin(root / "rooted.jsonl", data / "images") == without_origin(source)


def test_an_image_outside_its_root_is_refused(data):
    (data / "a.png").write_bytes(picture())
    cases = [
        (asked(images=[name]), "--image-root", "images/../a.png lies outside the root that it was read with")
        for name in ("../a.png", f"{data}/a.png")
    ]
    cases.append((asked(images=["images/a.png"]), "--out-image-root", f"images/a.png lies outside {data}/images/other"))
    for row, option, message in cases:
        root = data / "images" / ("other" if option == "--out-image-root" else "")
        result = run(write_lines(data / "in.jsonl", row), data / "out.jsonl", option, root)
        assert result.exit_code == 1 and not (data / "out.jsonl").exists()
        assert f"in.jsonl:1: image {data}/{message}" in result.stderr


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_embedded_images_are_written_byte_for_byte_under_their_key(tmp_path):
    pictures = [picture("PNG"), picture("JPEG"), picture("PNG"), b"no image"]
    source = write_lines(tmp_path / "in.jsonl", *(asked(images=[data_url(data)]) for data in pictures))
    report = json.loads(run(source, tmp_path / "out" / "train.jsonl", "--json").stdout)
    assert (report["num_embedded"], report["num_written"], report["num_images"]) == (3, 3, 3)
    images = [record.images[0] for record in read_records(tmp_path / "out" / "train.jsonl")]
    suffixes = [".png", ".jpg", ".png", ".bin"]
    keys = [hashlib.sha256(data).hexdigest() for data in pictures]
    assert images == [tmp_path / "out" / "images" / (key + suffix) for key, suffix in zip(keys, suffixes, strict=True)]
    assert [image.read_bytes() for image in images] == pictures
    assert len(list((tmp_path / "out" / "images").iterdir())) == 3


def test_a_damaged_embedded_image_is_written_again(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", asked(images=[data_url(picture())]))
    assert "1 file written to" in run(source, tmp_path / "out.jsonl").stdout
    [image] = (tmp_path / "images").iterdir()
    image.write_bytes(b"damaged")
    assert "1 file written to" in run(source, tmp_path / "out.jsonl", "--overwrite").stdout
    assert image.read_bytes() == picture()


def test_the_report_counts_what_was_read_and_written(data):
    rows = [asked(images=[]), asked(images=["images/a.png"] * 2), asked(images=["images/b.png"])]
    text = run(write_lines(data / "more.jsonl", *rows), data / "out.jsonl").stdout
    for words in (*("more.jsonl, messages", "out.jsonl, canonical", "3, 3 questions"), "2 files named"):
        assert words in text
    assert "embedded" not in text


def test_existing_files_are_never_lost(data):
    source = data / "train.jsonl"
    before = source.read_bytes()
    result = run(source, source, "--overwrite")
    assert result.exit_code == 2 and "is also the file to read; name another file to write" in result.stderr
    other = write_lines(data / "out.jsonl", {})
    result = run(source, other)
    assert result.exit_code == 2 and "exists; name another file, or replace it with --overwrite" in result.stderr
    write_lines(data / "bad.jsonl", asked(), asked(images=["http://example.org/a.jpg"]))
    result = run(data / "bad.jsonl", other, "--overwrite")
    assert result.exit_code == 1 and f"{data}/bad.jsonl:2: image 'http://example.org/a.jpg' is not on" in result.stderr
    assert (source.read_bytes(), other.read_text()) == (before, "{}\n")


def test_an_archive_that_holds_the_images_is_not_replaced(tmp_path):
    columns = {"image": pa.array([{"bytes": picture()}], STRUCT), "question": ["Q"], "answer": ["A"]}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    source = write_lines(tmp_path / "in.jsonl", asked(images=["x.parquet/0"]))
    result = run(source, tmp_path / "x.parquet", "--overwrite")
    assert result.exit_code == 2 and "x.parquet holds images of these records" in result.stderr
    assert read_bytes(tmp_path / "x.parquet" / "0") == picture()


def test_mistakes_are_messages(data):
    source, out = data / "train.jsonl", data / "out.jsonl"
    for words, code, message in (
        (("nothing.jsonl", out), 2, "no records file at"),
        ((source, data / "out.csv", "--to", "llava"), 2, "CSV holds flat records, not the format llava"),
        ((source, out, "--to", "flat", "--format", "alpaca"), 1, "train.jsonl:1: expected the key `instruction`"),
    ):
        result = run(*words)
        assert result.exit_code == code and message in result.stderr and "Traceback" not in result.stderr
        assert not list(data.glob("out.*"))


@pytest.mark.parametrize("name", ["b.xlsx", "b", "b.JSONL", "b.parquet"])
def test_an_unknown_suffix_is_refused_and_a_known_one_accepted(data, name):
    done = run(data / "train.jsonl", data / name)
    if name in ("b.xlsx", "b"):
        assert done.exit_code == 2 and not (data / name).exists()
        assert f"{name}: " in done.output and ".jsonl, .json, .csv, .tsv, .parquet" in done.output
    else:
        assert done.exit_code == 0
