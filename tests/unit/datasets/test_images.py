"""Image files: keys, stamps, sizes, and what is wrong with them."""

from __future__ import annotations

import hashlib
import io
import os
import random
import socket
import tarfile
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps
from support.rows import encoded as saved

from lookonce.datasets import images
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

MEGABYTE = 1_000_000


def record(*images: Path, origin: str = "train.jsonl:1") -> Record:
    return Record(images, turns=(), origin=origin)


def file(folder: Path, name: str, content: bytes = b"pixels") -> Path:
    path = folder / name
    path.write_bytes(content)
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
    path = file(tmp_path, "a.jpg", content)
    assert image_key(path) == sha256(content)
    assert read_bytes(path) == content
    assert index_images([record(path)]).key_of == {path: sha256(content)}


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_paths_and_links_to_the_same_bytes_are_one_image_at_the_first_path(tmp_path, reverse):
    paths = sorted((file(tmp_path, name) for name in ("a.jpg", "b.jpg", "c.jpg")), reverse=reverse)
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
    good, path = file(tmp_path / "root", "good.jpg", bytes(2000)), tmp_path / "root" / name
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
    paths = [file(tmp_path, f"{number}.jpg", bytes(MEGABYTE)) for number in range(60)]
    assert peak_bytes(lambda: [None for _ in read_many(paths)]) < 25 * MEGABYTE
    assert peak_bytes(lambda: index_images([record(*paths)])) < 25 * MEGABYTE


def encoded(file_format: str, size: tuple[int, int] = (30, 20)) -> bytes:
    return saved(Image.new("RGB", size), file_format)


def bomb(width: int) -> bytes:
    """A PNG header of a square image of this width."""
    header = b"IHDR" + width.to_bytes(4) * 2 + b"\x08\0\0\0\0"
    return b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + header + zlib.crc32(header).to_bytes(4)


SIZES = {
    "JPEG": (encoded("JPEG"), (30, 20)),
    "PNG": (encoded("PNG"), (30, 20)),
    "WebP": (encoded("WEBP"), (30, 20)),
    "cut JPEG": (encoded("JPEG", (300, 200))[:-300], (300, 200)),
    "empty": (b"", None),
    "text": (b"this is not an image", None),
    "bomb": (bomb(1_000_000), None),
    "broken PPM": (b"P6\n3x 2\n255\n", None),
    "broken TIFF": (b"II*\0" + b"\xff" * 20, None),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of some damage
@pytest.mark.parametrize(("content", "size"), SIZES.values(), ids=SIZES)
def test_size_is_read_from_the_header_or_is_none(tmp_path, content, size, index):
    assert image_size(content) == size
    (tmp_path / "a.jpg").write_bytes(content)
    assert index(tmp_path / "a.jpg").size_of == {hashlib.sha256(content).hexdigest(): size}


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


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


LONG_AGO = 10**9


def old_file(path: Path, content: bytes = b"image", seconds: float = LONG_AGO) -> Path:
    path.write_bytes(content)
    os.utime(path, (seconds, seconds))
    return path


def test_a_stamp_is_size_and_both_times(tmp_path, files_are_old):
    path = old_file(tmp_path / "a.jpg")
    before = stamp(path)
    assert before == (5, LONG_AGO * 10**9, path.stat().st_ctime_ns)
    time.sleep(0.01)
    path.write_bytes(b"other")
    os.utime(path, (LONG_AGO, LONG_AGO))
    assert before and stamp(path) and before[:2] == stamp(path)[:2] and before != stamp(path)


@pytest.mark.parametrize(("age", "has_one"), [(TICK_S / 2, False), (TICK_S + 5, True)])
def test_a_file_that_was_just_changed_has_no_stamp(tmp_path, monkeypatch, age, has_one):
    path = old_file(tmp_path / "a.jpg")
    monkeypatch.setattr(images, "now", lambda: path.stat().st_ctime + age)
    assert bool(stamp(path)) is has_one
    os.utime(path, (time.time() + 100,) * 2)
    assert not stamp(path)


def test_images_in_an_archive_have_the_stamp_of_the_archive(tmp_path, files_are_old):
    image, archive = old_file(tmp_path / "a.jpg"), tmp_path / "frames.tar"
    with tarfile.open(archive, "w") as file:
        file.add(image, "a.jpg")
    old_file(archive, archive.read_bytes(), LONG_AGO + 1)
    members = [archive / name for name in ("a.jpg", "b.jpg")]
    found = stamps([*members, image])
    assert found == {image: stamp(image)} | dict.fromkeys(members, stamp(archive))
    assert found[members[0]][:2] == (archive.stat().st_size, (LONG_AGO + 1) * 10**9)
