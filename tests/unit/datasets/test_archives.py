"""Images in archives, and what is wrong with archives."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lookonce.datasets import images
from lookonce.datasets.archives import find_archive
from lookonce.datasets.images import read_bytes, read_many
from lookonce.errors import ImageError

MEGABYTE = 1_000_000


Make = Callable[[Any, Path], Any]
"""Writes an archive, given the writer and a path."""


# file name, method that writes it and its options, whether images are named by their row
@pytest.mark.parametrize(
    ("name", "method", "options", "by_row"),
    [
        ("x", "folder", {}, False),
        ("x.tar", "folder", {}, False),
        ("x.tar", "tar", {"format": tarfile.GNU_FORMAT}, False),
        ("x.y.TAR", "tar", {"format": tarfile.PAX_FORMAT}, False),
        ("x.tar", "tar_of_folder", {}, False),
        ("train-00000-of-00001.parquet", "struct", {}, True),
        ("train.Parquet", "struct", {}, True),
        ("x.parquet", "plain", {}, True),
        ("x.tar/y.tar", "tar", {}, False),  # below a folder called as an archive
    ],
)
def test_images_are_the_same_in_a_folder_and_in_archives(
    tmp_path, name, method, options, by_row, writer, named_images, index
):
    archive = tmp_path / name
    archive.parent.mkdir(exist_ok=True)
    getattr(writer, method)(archive, named_images, **options)
    expected = {archive / (str(row) if by_row else name): named_images[name] for row, name in enumerate(named_images)}
    found = index(*expected)
    assert found.key_of == {path: hashlib.sha256(content).hexdigest() for path, content in expected.items()}
    assert (found.unusable, found.num_distinct) == ({}, len(named_images))
    assert dict(read_many(expected)) == {path: read_bytes(path) for path in expected} == expected


def test_an_archive_is_a_file_with_an_archive_name_that_a_path_leads_into(tmp_path):
    for name in ("a.tar", "b.PARQUET", "c.tar.gz", ".tar", "d.zip", "tar"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link.tar").symlink_to("a.tar")
    (tmp_path / "folder.tar").mkdir()
    leads_into = {
        "a.tar/x.jpg": "a.tar",
        "a.tar/b/c.parquet/d.jpg": "a.tar",
        "b.PARQUET/17": "b.PARQUET",
        "c.tar.gz/x.jpg": "c.tar.gz",
        "link.tar/x.jpg": "link.tar",
        "a.tar": None,
        "folder.tar/x.jpg": None,
        "missing.tar/x.jpg": None,
        ".tar/x.jpg": None,
        "d.zip/x.jpg": None,
        "tar/x.jpg": None,
        "folder.tar/../a.tar/x.jpg": None,
    }
    for name, expected in leads_into.items():
        assert find_archive(tmp_path / name) == (tmp_path / expected if expected else None), name


def test_files_by_key_come_first_then_archives_in_member_order_for_any_order_of_records(tmp_path, writer, index):
    members = {f"{name}.jpg": name.encode() for name in "zaymbx"}
    writer.tar(tmp_path / "b.tar", members)
    writer.struct(tmp_path / "a.parquet", {f"{name}.jpg": f"{name} in parquet".encode() for name in "kcj"})
    writer.folder(tmp_path, {f"{name}.jpg": f"{name} in a file".encode() for name in "qrst"})
    files = sorted((tmp_path / f"{name}.jpg" for name in "qrst"), key=images.image_key)
    expected = [
        *files,
        *(tmp_path / "a.parquet" / str(row) for row in range(3)),
        *(tmp_path / "b.tar" / name for name in members),
    ]
    for seed in range(4):
        found = index(*random.Random(seed).sample(expected, len(expected)))
        assert list(found.path_of.values()) == expected
        assert list(found.path_of) == list(found.size_of)
        assert list(found.key_of) == sorted(expected)
    assert [path for path, _ in read_many(found.path_of.values())] == expected


def test_a_member_that_a_tar_file_has_twice_is_refused(tmp_path, writer):
    path = tmp_path / "x.tar"
    writer.tar(path, [("a.jpg", b"first"), ("./a.jpg", b"second"), ("b.jpg", b"b")])
    found = dict(read_many([path / "a.jpg", path / "b.jpg"]))
    assert found[path / "b.jpg"] == b"b" and "has the member 'a.jpg' twice" in str(found[path / "a.jpg"])
    writer.tar(path, [("a.jpg", b"first"), ("b.jpg", b"b")])
    assert read_bytes(path / "a.jpg") == b"first"


def test_of_several_image_columns_the_one_called_image_is_read(tmp_path, writer):
    writer.table(tmp_path / "x.parquet", 1, a=pa.array([b"a"]), image=pa.array([b"b"]))
    assert read_bytes(tmp_path / "x.parquet" / "0") == b"b"


def test_the_members_of_a_tar_are_never_all_in_memory(tmp_path, writer, index):
    files = {f"{number}.jpg": bytes([number]) * MEGABYTE for number in range(40)}
    writer.tar(tmp_path / "x.tar", files)
    paths = [tmp_path / "x.tar" / name for name in files]
    read_bytes(paths[0])  # imports what is imported once
    tracemalloc.start()
    try:
        assert len(index(*paths).key_of) == 40
        assert tracemalloc.get_traced_memory()[1] < 10 * MEGABYTE
    finally:
        tracemalloc.stop()


def test_one_row_group_of_a_parquet_file_is_in_memory(tmp_path, writer):
    rng = random.Random(0)
    files = {str(number): rng.randbytes(MEGABYTE) for number in range(40)}
    writer.struct(tmp_path / "x.parquet", files, row_group_size=4)
    before, peak = pa.total_allocated_bytes(), 0
    for path, data in read_many(tmp_path / "x.parquet" / name for name in files):  # their names are their rows
        assert data == files[path.name]
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 0 < peak < 3.5 * 4 * MEGABYTE
    assert pa.total_allocated_bytes() == before


NO_MEMBER = "the archive has no such member, or is cut off before it"
DAMAGED = "the archive is cut off or damaged ("
TOO_LARGE = "it has 4,001 bytes, more than an image may have (the limit is 4,000)"
NO_COLUMN = "expected one image column (a struct with `bytes`, or binary), or several of which one is called `image`;"
GOOD = {f"{number}.jpg": bytes([number]) * 3000 for number in range(6)}


def cut(num_bytes: int) -> Make:
    """An archive of the good images that ends after this many bytes."""

    def make(writer: Any, path: Path) -> None:
        whole(writer, path)
        path.write_bytes(path.read_bytes()[:num_bytes])

    return make


def holding(content: bytes) -> Make:
    return lambda writer, path: path.write_bytes(content)


def whole(writer: Any, path: Path) -> None:
    (writer.tar if path.suffix == ".tar" else writer.struct)(path, GOOD)


def large(writer: Any, path: Path) -> None:
    (writer.tar if path.suffix == ".tar" else writer.struct)(path, GOOD | {"1.jpg": bytes(4001)})


def broken_header(writer: Any, path: Path) -> None:
    whole(writer, path)
    path.write_bytes(path.read_bytes().replace(b"2.jpg", b"\xff" * 5))


def columns(**arrays: pa.Array) -> Make:
    return lambda writer, path: writer.table(path, 3, **arrays)


def broken_row_group(writer: Any, path: Path) -> None:
    table = pa.table({"image": pa.array(GOOD.values(), pa.binary())})
    parquet.write_table(table, path, row_group_size=2, use_dictionary=False, compression="none")
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 12] = b"\xff" * 12
    path.write_bytes(content)


TEXT, NULLS = b"no archive " * 900, [None, {"bytes": None, "path": "1.jpg"}, {"bytes": b"given", "path": "2.jpg"}]
# suffix of the archive, what it is -> function that writes it, wanted members, how many of the first or which are
# read, reason for the others

BAD: dict[tuple[str, str], tuple[Make, str, str, str]] = {
    ("tar", "member missing"): (whole, "0.jpg 9.jpg", "0.jpg", NO_MEMBER),
    ("tar", "cut in a member"): (
        cut(2 * 3584 + 700),
        "0.jpg 1.jpg 2.jpg 3.jpg",
        "0.jpg 1.jpg",
        f"{DAMAGED}unexpected end of data)",
    ),
    ("tar", "cut after all that is wanted"): (cut(2 * 3584 + 700), "0.jpg 1.jpg", "0.jpg 1.jpg", ""),
    ("tar", "header broken"): (broken_header, "0.jpg 1.jpg 2.jpg", "0.jpg 1.jpg", "cut off"),
    ("tar", "member too large"): (large, "0.jpg 1.jpg 2.jpg", "0.jpg 2.jpg", TOO_LARGE),
    ("tgz", "compressed"): (holding(b""), "0.jpg", "", "decompress it once, with `gunzip "),
    ("parquet", "row missing"): (whole, "0 6 5", "0 5", NO_MEMBER),
    ("parquet", "no row number"): (whole, "0.jpg 007 -1 0", "0", NO_MEMBER),
    ("parquet", "no bytes"): (columns(image=pa.array(NULLS)), "0 1 2", "2", "its row has no image bytes"),
    ("parquet", "cut"): (cut(900), "0", "", DAMAGED),
    ("parquet", "row group broken"): (broken_row_group, "0 2 3 4", "0 4", DAMAGED),
    ("parquet", "row too large"): (large, "0 1 2", "0 2", TOO_LARGE),
    ("parquet", "no images"): (columns(question=pa.array(["?"])), "0", "", f"{NO_COLUMN} the columns are ['question']"),
}


@pytest.mark.parametrize("case", BAD, ids=", ".join)
def test_unreadable_members_are_reported_with_the_reason_and_the_others_are_read(
    tmp_path, monkeypatch, case, writer, index
):
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 4000)
    (make, wanted, readable, reason), archive = BAD[case], tmp_path / f"x.{case[0]}"
    make(writer, archive)
    paths = [archive / name for name in wanted.split()]
    found = dict(read_many(paths))
    errors = {path: str(error) for path, error in found.items() if isinstance(error, ImageError)}
    assert found.keys() == {*paths} and found.keys() - errors.keys() == {archive / name for name in readable.split()}
    for path, message in errors.items():
        assert message.startswith(f"cannot read image {path}: ") and reason in message
        with pytest.raises(ImageError):
            read_bytes(path)
    (tmp_path / "good.jpg").write_bytes(b"good")
    assert index(*paths, tmp_path / "good.jpg").unusable == errors


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(("name", "method"), [("x.tar", "tar"), ("x.parquet", "plain")])
def test_an_archive_without_read_permission_is_reported(tmp_path, name, method, writer):
    getattr(writer, method)(tmp_path / name, GOOD)
    (tmp_path / name).chmod(0)
    with pytest.raises(ImageError, match=r"the archive cannot be read \(.*Permission denied"):
        read_bytes(tmp_path / name / "0")


def test_an_import_error_is_not_reported_as_a_damaged_archive(tmp_path, monkeypatch, writer):
    whole(writer, tmp_path / "x.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match="pyarrow.parquet"):
        read_bytes(tmp_path / "x.parquet" / "0.jpg")
