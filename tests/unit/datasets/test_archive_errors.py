"""Unreadable members of tar and parquet files are reported, and the others are read."""

from __future__ import annotations

import os
import random
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lookonce.datasets import images
from lookonce.datasets.images import ImageIndex, read_bytes, read_many
from lookonce.errors import ImageError

NO_MEMBER = "the archive has no such member, or is cut off before it"
DAMAGED = "the archive is cut off or damaged ("
GOOD = {f"{number}.jpg": bytes([number]) * 3000 for number in range(6)}


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def overwrite(path: Path, old: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, b"\xff" * len(old)))


def with_special_member(path: Path, **fields: Any) -> None:
    """A tar with a regular member, and `0.jpg`, which is a folder or a link."""
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("0.jpg")
        for name, value in fields.items():
            setattr(member, name, value)
        tar.addfile(member)
        tar.addfile(tarfile.TarInfo("1.jpg"))


def null_bytes(writer: Any, path: Path) -> None:
    rows = [None, {"bytes": None, "path": "1.jpg"}, {"bytes": b"given", "path": "2.jpg"}]
    writer.table(path, 3, image=pa.array(rows))


def broken_row_group(path: Path) -> None:
    parquet.write_table(
        pa.table({"image": pa.array(GOOD.values(), pa.binary())}),
        path,
        row_group_size=2,
        use_dictionary=False,
        compression="none",
    )
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 12] = b"\xff" * 12
    path.write_bytes(content)


# name -> archive, function that writes it, wanted members, those that are read, reason for the others

BAD: dict[str, tuple[str, Callable[[Any, Path], Any], list[str], list[str], str]] = {
    "tar, member missing": ("x.tar", lambda writer, p: writer.tar(p, GOOD), ["0.jpg", "9.jpg"], ["0.jpg"], NO_MEMBER),
    "tar, member a folder": (
        "x.tar",
        lambda writer, p: with_special_member(p, type=tarfile.DIRTYPE),
        ["0.jpg", "1.jpg"],
        ["1.jpg"],
        NO_MEMBER,
    ),
    "tar, member a link": (
        "x.tar",
        lambda writer, p: with_special_member(p, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        ["0.jpg", "1.jpg"],
        ["1.jpg"],
        NO_MEMBER,
    ),
    "tar, below a member": (
        "x.tar",
        lambda writer, p: writer.tar(p, GOOD),
        ["0.jpg/a.jpg", "0.jpg"],
        ["0.jpg"],
        NO_MEMBER,
    ),
    "tar, 0 bytes": ("x.tar", lambda writer, p: p.write_bytes(b""), ["0.jpg"], [], DAMAGED),
    "tar, text": ("x.tar", lambda writer, p: p.write_bytes(b"no archive " * 900), ["0.jpg"], [], DAMAGED),
    "tar, cut in a member": (
        "x.tar",
        lambda writer, p: (writer.tar(p, GOOD), cut(p, 2 * 3584 + 700)),
        ["0.jpg", "1.jpg", "2.jpg", "3.jpg"],
        ["0.jpg", "1.jpg"],
        f"{DAMAGED}unexpected end of data)",
    ),
    "tar, cut in a header": (
        "x.tar",
        lambda writer, p: (writer.tar(p, GOOD), cut(p, 2 * 3584 + 200)),
        ["0.jpg", "1.jpg", "2.jpg"],
        ["0.jpg", "1.jpg"],
        "cut off",
    ),
    "tar, cut between members": (
        "x.tar",
        lambda writer, p: (writer.tar(p, GOOD), cut(p, 2 * 3584)),
        ["0.jpg", "1.jpg", "2.jpg"],
        ["0.jpg", "1.jpg"],
        NO_MEMBER,
    ),
    "tar, cut after all that is wanted": (
        "x.tar",
        lambda writer, p: (writer.tar(p, GOOD), cut(p, 2 * 3584 + 700)),
        ["0.jpg", "1.jpg"],
        ["0.jpg", "1.jpg"],
        "",
    ),
    "tar, header broken": (
        "x.tar",
        lambda writer, p: (writer.tar(p, GOOD), overwrite(p, b"2.jpg")),
        ["0.jpg", "1.jpg", "2.jpg"],
        ["0.jpg", "1.jpg"],
        "cut off",
    ),
    "tar, member too large": (
        "x.tar",
        lambda writer, p: writer.tar(p, GOOD | {"1.jpg": bytes(4001)}),
        ["0.jpg", "1.jpg", "2.jpg"],
        ["0.jpg", "2.jpg"],
        "it has 4,001 bytes, more than an image may have (the limit is 4,000)",
    ),
    "tar, compressed": (
        "x.tgz",
        lambda writer, p: p.write_bytes(b""),
        ["0.jpg"],
        [],
        "decompress it once, with `gunzip ",
    ),
    "parquet, row missing": (
        "x.parquet",
        lambda writer, p: writer.struct(p, GOOD),
        ["0", "6", "5"],
        ["0", "5"],
        NO_MEMBER,
    ),
    "parquet, row without end": (
        "x.parquet",
        lambda writer, p: writer.struct(p, GOOD),
        ["9" * 30, "0"],
        ["0"],
        NO_MEMBER,
    ),
    "parquet, negative row": ("x.parquet", lambda writer, p: writer.struct(p, GOOD), ["-1", "0"], ["0"], NO_MEMBER),
    "parquet, name missing": (
        "x.parquet",
        lambda writer, p: writer.struct(p, GOOD),
        ["9.jpg", "0.jpg"],
        ["0.jpg"],
        NO_MEMBER,
    ),
    "parquet, no names": ("x.parquet", lambda writer, p: writer.plain(p, GOOD), ["0.jpg", "0"], ["0"], NO_MEMBER),
    "parquet, no bytes": ("x.parquet", null_bytes, ["0", "1.jpg", "2"], ["2"], "its row has no image bytes"),
    "parquet, no rows": ("x.parquet", lambda writer, p: writer.plain(p, {}), ["0"], [], NO_MEMBER),
    "parquet, 0 bytes": ("x.parquet", lambda writer, p: p.write_bytes(b""), ["0"], [], DAMAGED),
    "parquet, text": ("x.parquet", lambda writer, p: p.write_bytes(b"no archive " * 900), ["0", "a.jpg"], [], DAMAGED),
    "parquet, cut": ("x.parquet", lambda writer, p: (writer.struct(p, GOOD), cut(p, 900)), ["0"], [], DAMAGED),
    "parquet, row group broken": (
        "x.parquet",
        lambda writer, p: broken_row_group(p),
        ["0", "2", "3", "4"],
        ["0", "4"],
        DAMAGED,
    ),
    "parquet, row too large": (
        "x.parquet",
        lambda writer, p: writer.struct(p, GOOD | {"1.jpg": bytes(4001)}),
        ["0.jpg", "1.jpg", "2.jpg"],
        ["0.jpg", "2.jpg"],
        "it has 4,001 bytes, more than an image may have (the limit is 4,000)",
    ),
    "parquet, no images": (
        "x.parquet",
        lambda writer, p: writer.table(p, 1, question=pa.array(["?"])),
        ["0"],
        [],
        "expected one image column (a struct with `bytes`, or binary), or several of which one is called `image`; "
        "the columns are ['question']",
    ),
    "parquet, two columns of images": (
        "x.parquet",
        lambda writer, p: writer.table(p, 1, a=pa.array([b"a"]), b=pa.array([b"b"])),
        ["0"],
        [],
        "the columns are ['a', 'b']",
    ),
}


@pytest.mark.parametrize(("archive", "make", "wanted", "readable", "reason"), BAD.values(), ids=BAD)
def test_unreadable_members_are_reported_with_the_reason_and_the_others_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    archive: str,
    make: Callable[[Any, Path], Any],
    wanted: list[str],
    readable: list[str],
    reason: str,
    writer: Any,
    index: Callable[..., ImageIndex],
) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 4000)
    make(writer, tmp_path / archive)
    paths = [tmp_path / archive / name for name in wanted]
    found = dict(read_many(paths))
    assert found.keys() == set(paths)
    errors = {path: str(error) for path, error in found.items() if isinstance(error, ImageError)}
    assert [name for name, path in zip(wanted, paths, strict=True) if path not in errors] == readable
    for path, message in errors.items():
        assert message.startswith(f"cannot read image {path}: ") and reason in message
        with pytest.raises(ImageError):
            read_bytes(path)
    (tmp_path / "good.jpg").write_bytes(b"good")
    assert index(*paths, tmp_path / "good.jpg").unusable == errors


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize(("name", "method"), [("x.tar", "tar"), ("x.parquet", "plain")])
def test_an_archive_without_read_permission_is_reported(tmp_path: Path, name: str, method: str, writer: Any) -> None:
    getattr(writer, method)(tmp_path / name, GOOD)
    (tmp_path / name).chmod(0)
    with pytest.raises(ImageError, match=r"the archive cannot be read \(.*Permission denied"):
        read_bytes(tmp_path / name / "0")


@pytest.mark.parametrize(("name", "method"), [("x.tar", "tar"), ("x.parquet", "struct")])
def test_random_damage_of_an_archive_gives_bytes_or_an_error_for_each_path(
    tmp_path: Path, name: str, method: str, writer: Any, named_images: dict[str, bytes]
) -> None:
    archive = tmp_path / name
    getattr(writer, method)(archive, named_images)
    content, rng, paths = archive.read_bytes(), random.Random(0), [archive / name for name in named_images]
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        archive.write_bytes(damaged[: rng.choice((None, rng.randrange(len(damaged))))])
        assert dict(read_many(paths)).keys() == set(paths)


# Libraries, threads and memory.


@pytest.mark.parametrize(
    ("name", "method", "module"),
    [("x.parquet", "plain", "pyarrow.parquet")],
)
def test_an_import_error_is_not_reported_as_a_damaged_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str, module: str, writer: Any
) -> None:
    getattr(writer, method)(tmp_path / name, GOOD)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):
        read_bytes(tmp_path / name / "0.jpg")
