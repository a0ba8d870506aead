"""Image files and archives of images: keys, stamps, sizes, and what is wrong with them."""

from __future__ import annotations

import hashlib
import io
import os
import random
import socket
import sys
import tarfile
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image, ImageOps
from pyarrow import parquet
from support.rows import encoded as saved

from lookonce.datasets import images
from lookonce.datasets.archives import find_archive
from lookonce.datasets.images import (
    TICK_S,
    ImageIndex,
    image_key,
    image_size,
    index_images,
    read_bytes,
    read_many,
    stamp,
    stamps,
)
from lookonce.datasets.records import Record
from lookonce.errors import ImageError

MEGABYTE, LONG_AGO = 1_000_000, 10**9


def record(*images: Path, origin: str = "train.jsonl:1") -> Record:
    return Record(images, turns=(), origin=origin)


def file(path: Path, content: bytes = b"pixels", seconds: float = LONG_AGO) -> Path:
    path.write_bytes(content)
    os.utime(path, (seconds, seconds))
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def in_time(function: Callable[[], Any], seconds: float = 20) -> Any:
    """The result of `function`; fails if it takes longer."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"no result within {seconds} seconds"
    return results[0]


def peak_bytes(function: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"pixels", bytes(3_000_000)], ids=["empty", "small", "large"])
def test_key_is_the_sha256_of_the_bytes_in_full_width(tmp_path, content):
    path = file(tmp_path / "a.jpg", content)
    assert image_key(path) == sha256(content)
    assert read_bytes(path) == content
    assert index_images([record(path)]).key_of == {path: sha256(content)}


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_paths_and_links_to_the_same_bytes_are_one_image_at_the_first_path(tmp_path, reverse):
    paths = sorted((file(tmp_path / name) for name in ("a.jpg", "b.jpg", "c.jpg")), reverse=reverse)
    (tmp_path / "link.jpg").symlink_to(paths[0])
    index = index_images([*(record(path) for path in paths), record(paths[0], tmp_path / "link.jpg")])
    key = sha256(b"pixels")
    assert index.key_of == dict.fromkeys([*paths, tmp_path / "link.jpg"], key)
    assert (index.path_of, index.num_files, index.num_distinct) == ({key: tmp_path / "a.jpg"}, 4, 1)


def test_records_without_images_have_an_empty_index():
    assert index_images([record()]) == ImageIndex({}, {})
    assert index_images([]).num_files == 0


# Unreadable files.


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder = os.open(path.parent, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{folder}/{path.name}")  # socket paths are limited to 108 bytes
        os.close(folder)


def unlocked(path: Path) -> None:
    path.write_bytes(b"pixels")
    path.chmod(0)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def too_large(path: Path) -> None:
    path.write_bytes(bytes(2001))


def nothing(path: Path) -> None:
    pass


def empty(path: Path) -> None:
    path.resolve().write_bytes(b"")


DEVICE, FOLDER = "it is a FIFO or a device; expected a file", "it is a folder; expected a file"
OUTSIDE = "it leads out of the image root"
HOSTILE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("x.jpg", nothing, "No such file or directory"),
    "dangling link": ("x.jpg", link_to("gone.jpg"), "it is a link to gone.jpg, which does not exist"),
    "folder": ("x.jpg", Path.mkdir, FOLDER),
    "FIFO": ("x.jpg", os.mkfifo, DEVICE),
    "device": ("x.jpg", link_to("/dev/zero"), DEVICE),
    "socket": ("x.jpg", unix_socket, "it is a socket; expected a file"),
    "too large": ("x.jpg", too_large, "it has 2,001 bytes, more than an image may have (the limit is 2,000)"),
    "no permission": ("x.jpg", unlocked, "Permission denied"),
    "name too long": ("a" * 300, nothing, "File name too long"),
    "name with a null": ("a\0b.jpg", nothing, "it is not a valid file name (embedded null byte)"),
    "missing archive": ("x.tar/a.jpg", nothing, "No such file or directory"),
    "compressed archive": ("x.tar.gz/a.jpg", lambda path: empty(path.parent), "decompress it once, with `gunzip "),
    "out of the root": ("../x.jpg", empty, OUTSIDE),
    "out of the root, archive": ("../x.tar/a.jpg", lambda path: empty(path.resolve().parent), OUTSIDE),
}


@pytest.mark.parametrize(("name", "make", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_unreadable_files_are_reported_with_the_reason_and_stop_nothing(tmp_path, monkeypatch, name, make, reason):
    if make is unlocked and os.geteuid() == 0:
        pytest.skip("root may read everything")
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 2000)
    (tmp_path / "root").mkdir()
    good, path = file(tmp_path / "root" / "good.jpg", bytes(2000)), tmp_path / "root" / name
    make(path)

    (_, given), (_, error) = in_time(lambda: list(read_many([good, path])))
    assert given == good.read_bytes()
    assert isinstance(error, ImageError)
    shown = ascii(str(path))[1:-1]
    assert str(error).startswith(f"cannot read image {shown}: ") and reason in str(error)

    index = in_time(lambda: index_images([record(path, good)]))
    assert index.unusable == {path: str(error)}
    assert (list(index.key_of), index.num_files, index.num_distinct) == ([good], 2, 1)

    with pytest.raises(ImageError) as refusal:
        read_bytes(path)
    assert str(refusal.value) == str(error)


def test_if_no_image_can_be_read_the_first_five_are_named_once_with_their_first_record(tmp_path):
    records = [record(tmp_path / f"{n}.jpg", origin=f"train.jsonl:{n}") for n in range(7)]
    again = record(tmp_path / "0.jpg", origin="val.jsonl:1")
    with pytest.raises(ImageError) as refusal:
        index_images([*records, again])
    first, *named, advice = str(refusal.value).splitlines()
    assert first == "no image can be read; 7 images tried:" and "data.image_root" in advice
    missing = "  cannot read image {0}/{1}.jpg: No such file or directory (train.jsonl:{1})"
    assert named == [*(missing.format(tmp_path, n) for n in range(5)), "  and 2 more"]


# Reading many.


def test_bytes_are_never_all_in_memory(tmp_path):
    paths = [file(tmp_path / f"{number}.jpg", bytes(MEGABYTE)) for number in range(60)]
    assert peak_bytes(lambda: [None for _ in read_many(paths)]) < 25 * MEGABYTE
    assert peak_bytes(lambda: index_images([record(*paths)])) < 25 * MEGABYTE


def encoded(file_format: str, size: tuple[int, int] = (30, 20)) -> bytes:
    return saved(Image.new("RGB", size), file_format)


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


SIZES = {
    "JPEG": (encoded("JPEG"), (30, 20)),
    "PNG": (encoded("PNG"), (30, 20)),
    "WebP": (encoded("WEBP"), (30, 20)),
    "cut JPEG": (encoded("JPEG", (300, 200))[:-300], (300, 200)),
    "empty": (b"", None),
    "text": (b"this is not an image", None),
    "bomb": (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", 2 * (10**6).to_bytes(4) + b"\x08\0\0\0\0"), None),
    "broken PPM": (b"P6\n3x 2\n255\n", None),
    "broken TIFF": (b"II*\0" + b"\xff" * 20, None),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of some damage
@pytest.mark.parametrize(("content", "size"), SIZES.values(), ids=SIZES)
def test_size_is_read_from_the_header_or_is_none(tmp_path, content, size, index):
    assert image_size(content) == size
    assert index(file(tmp_path / "a.jpg", content)).size_of == {sha256(content): size}


def with_exif(file_format: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.effect_noise((30, 20), 80), file_format, exif=exif)


def png_with(added: bytes, where: int | None = None) -> bytes:
    """A PNG with one more chunk, by default after the pixels."""
    content = encoded("PNG")
    where = content.rindex(b"IEND") - 4 if where is None else where
    return content[:where] + added + content[where:]


RAW_EXIF = with_exif("JPEG", 6).partition(b"Exif\0\0")[2][:26]
XMP = chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<rdf tiff:Orientation="8"/>')
PROFILE = zlib.compress(b"\nexif\n      32\n" + (b"Exif\0\0" + RAW_EXIF).hex().encode())
SHOWN = {
    f"{file_format} {orientation}": with_exif(file_format, orientation)
    for file_format in ("JPEG", "PNG", "WEBP", "TIFF", "MPO")
    for orientation in (0, 1, 3, 5, 6, 8, 9)
} | {
    "PNG with EXIF after its pixels": png_with(chunk(b"eXIf", RAW_EXIF)),
    "PNG with XMP": png_with(XMP, 33),
    "PNG with XMP after its pixels": png_with(XMP),
    "PNG with a raw profile after its pixels": png_with(chunk(b"zTXt", b"Raw profile type exif\0\0" + PROFILE)),
    "PNG with other text": png_with(chunk(b"tEXt", b"Software\0" + b"eXIf")),
}


@pytest.mark.guarantee("An image's size is that of the picture as shown, read from the header.")
@pytest.mark.parametrize("name", SHOWN)
def test_the_size_is_that_of_the_image_as_shown_turned_as_its_name_says(name):
    with Image.open(io.BytesIO(SHOWN[name])) as image:
        assert image_size(SHOWN[name]) == ImageOps.exif_transpose(image).size
    assert image_size(SHOWN[name]) == ((20, 30) if name.endswith(("5", "6", "8", "pixels", "XMP")) else (30, 20))


def test_pixels_are_not_decoded_for_a_size(monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("the pixels were decoded"))
    for content in (encoded("PNG"), png_with(chunk(b"tEXt", b"Software\0x"))):
        assert image_size(content) == (30, 20)
    assert image_size(with_exif("PNG", 6)) == image_size(with_exif("JPEG", 6)) == (20, 30)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_no_damage_to_a_header_stops_the_index():
    rng = random.Random(0)
    for _ in range(300):
        content = bytearray(encoded(rng.choice(("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "ICO"))))
        for _ in range(3):
            content[rng.randrange(min(len(content), 60))] = rng.randrange(256)
        size = image_size(bytes(content))
        assert size is None or all(isinstance(side, int) for side in size)


def test_a_stamp_is_size_and_both_times(tmp_path, files_are_old):
    path = file(tmp_path / "a.jpg")
    before = stamp(path)
    assert before == (6, LONG_AGO * 10**9, path.stat().st_ctime_ns)
    time.sleep(0.01)
    path.write_bytes(b"others")
    os.utime(path, (LONG_AGO, LONG_AGO))
    assert before and stamp(path) and before[:2] == stamp(path)[:2] and before != stamp(path)


@pytest.mark.parametrize(("age", "has_one"), [(TICK_S / 2, False), (TICK_S + 5, True)])
def test_a_file_that_was_just_changed_has_no_stamp(tmp_path, monkeypatch, age, has_one):
    path = file(tmp_path / "a.jpg")
    monkeypatch.setattr(images, "now", lambda: path.stat().st_ctime + age)
    assert bool(stamp(path)) is has_one
    os.utime(path, (time.time() + 100,) * 2)
    assert not stamp(path)


def test_images_in_an_archive_have_the_stamp_of_the_archive(tmp_path, files_are_old):
    image, archive = file(tmp_path / "a.jpg"), tmp_path / "frames.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(image, "a.jpg")
    file(archive, archive.read_bytes(), LONG_AGO + 1)
    members = [archive / name for name in ("a.jpg", "b.jpg")]
    found = stamps([*members, image])
    assert found == {image: stamp(image)} | dict.fromkeys(members, stamp(archive))
    assert found[members[0]][:2] == (archive.stat().st_size, (LONG_AGO + 1) * 10**9)


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
    assert found.key_of == {path: sha256(content) for path, content in expected.items()}
    assert (found.unusable, found.num_distinct) == ({}, len(named_images))
    assert dict(read_many(expected)) == {path: read_bytes(path) for path in expected} == expected


def test_an_archive_is_a_file_with_an_archive_name_that_a_path_leads_into(tmp_path):
    for name in ("a.tar", "b.PARQUET", "c.tar.gz", ".tar", "d.zip", "tar"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link.tar").symlink_to("a.tar")
    (tmp_path / "folder.tar").mkdir()
    archives, deep = ("a.tar", "b.PARQUET", "c.tar.gz", "link.tar"), "a.tar/b/c.parquet/d.jpg"
    leads_into = {f"{name}/x.jpg": tmp_path / name for name in archives} | {deep: tmp_path / "a.tar"}
    no_archives = ("folder.tar", "missing.tar", ".tar", "d.zip", "tar", "folder.tar/../a.tar")
    leads_into |= dict.fromkeys(["a.tar", *(f"{name}/x.jpg" for name in no_archives)])
    assert {name: find_archive(tmp_path / name) for name in leads_into} == leads_into


def test_files_by_key_come_first_then_archives_in_member_order_for_any_order_of_records(tmp_path, writer, index):
    members = {f"{name}.jpg": name.encode() for name in "zaymbx"}
    writer.tar(tmp_path / "b.tar", members)
    writer.struct(tmp_path / "a.parquet", {f"{name}.jpg": f"{name} in parquet".encode() for name in "kcj"})
    writer.folder(tmp_path, {f"{name}.jpg": f"{name} in a file".encode() for name in "qrst"})
    expected = [
        *sorted((tmp_path / f"{name}.jpg" for name in "qrst"), key=image_key),
        *(tmp_path / "a.parquet" / str(row) for row in range(3)),
        *(tmp_path / "b.tar" / name for name in members),
    ]
    for seed in range(4):
        found = index(*random.Random(seed).sample(expected, len(expected)))
        assert list(found.path_of.values()) == expected and list(found.key_of) == sorted(expected)
        assert list(found.path_of) == list(found.size_of)
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
    assert peak_bytes(lambda: index(*paths)) < 10 * MEGABYTE


def test_one_row_group_of_a_parquet_file_is_in_memory(tmp_path, writer):
    rng = random.Random(0)
    files = {str(number): rng.randbytes(MEGABYTE) for number in range(40)}
    writer.struct(tmp_path / "x.parquet", files, row_group_size=4)
    before, peak = pa.total_allocated_bytes(), 0
    for path, data in read_many(tmp_path / "x.parquet" / name for name in files):  # their names are their rows
        assert data == files[path.name]
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 0 < peak < 3.5 * 4 * MEGABYTE and pa.total_allocated_bytes() == before


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


def whole(writer: Any, path: Path, **changed: bytes) -> None:
    (writer.tar if path.suffix == ".tar" else writer.struct)(path, GOOD | changed)


def large(writer: Any, path: Path) -> None:
    whole(writer, path, **{"1.jpg": bytes(4001)})


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


CUT, NULLS = cut(2 * 3584 + 700), [None, {"bytes": None, "path": "1.jpg"}, {"bytes": b"given", "path": "2.jpg"}]
# suffix of the archive, what it is -> function that writes it, wanted members, which are read, reason for the others
BAD: dict[tuple[str, str], tuple[Make, str, str, str]] = {
    ("tar", "member missing"): (whole, "0.jpg 9.jpg", "0.jpg", NO_MEMBER),
    ("tar", "cut in a member"): (CUT, "0.jpg 1.jpg 2.jpg 3.jpg", "0.jpg 1.jpg", f"{DAMAGED}unexpected end of data)"),
    ("tar", "cut after all that is wanted"): (CUT, "0.jpg 1.jpg", "0.jpg 1.jpg", ""),
    ("tar", "header broken"): (broken_header, "0.jpg 1.jpg 2.jpg", "0.jpg 1.jpg", "cut off"),
    ("tar", "member too large"): (large, "0.jpg 1.jpg 2.jpg", "0.jpg 2.jpg", TOO_LARGE),
    ("tgz", "compressed"): (cut(0), "0.jpg", "", "decompress it once, with `gunzip "),
    ("parquet", "row missing"): (whole, "0 6 5", "0 5", NO_MEMBER),
    ("parquet", "no row number"): (whole, "0.jpg 007 -1 0", "0", NO_MEMBER),
    ("parquet", "no bytes"): (columns(image=pa.array(NULLS)), "0 1 2", "2", "its row has no image bytes"),
    ("parquet", "cut"): (cut(900), "0", "", DAMAGED),
    ("parquet", "row group broken"): (broken_row_group, "0 2 3 4", "0 4", DAMAGED),
    ("parquet", "row too large"): (large, "0 1 2", "0 2", TOO_LARGE),
    ("parquet", "no images"): (columns(question=pa.array(["?"])), "0", "", f"{NO_COLUMN} the columns are ['question']"),
}


@pytest.mark.parametrize("case", BAD, ids=", ".join)
def test_unreadable_members_are_reported_and_the_others_are_read(tmp_path, monkeypatch, case, writer, index):
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
