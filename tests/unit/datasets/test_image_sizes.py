"""Image sizes are read from headers, whatever the damage."""

from __future__ import annotations

import hashlib
import io
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from lookonce.datasets.images import ImageIndex, image_size


def encoded(file_format: str, size: tuple[int, int] = (30, 20)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size).save(buffer, file_format)
    return buffer.getvalue()


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
def test_size_is_read_from_the_header_or_is_none(
    tmp_path: Path, content: bytes, size: tuple[int, int] | None, index: Callable[..., ImageIndex]
) -> None:
    assert image_size(content) == size
    (tmp_path / "a.jpg").write_bytes(content)
    assert index(tmp_path / "a.jpg").size_of == {hashlib.sha256(content).hexdigest(): size}


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


def with_exif(file_format: str, orientation: int) -> bytes:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.effect_noise((30, 20), 80).save(buffer, file_format, exif=exif)
    return buffer.getvalue()


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


@pytest.mark.parametrize("content", SHOWN.values(), ids=SHOWN)
def test_the_size_is_that_of_the_image_as_shown(content: bytes) -> None:
    with Image.open(io.BytesIO(content)) as image:
        assert image_size(content) == ImageOps.exif_transpose(image).size


def test_the_cases_are_turned_as_their_names_say() -> None:
    turned = {name for name, content in SHOWN.items() if image_size(content) == (20, 30)}
    assert turned == {name for name in SHOWN if name.endswith(("5", "6", "8", "pixels", "XMP"))}


def test_pixels_are_not_decoded_for_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("the pixels were decoded"))
    for content in (encoded("PNG"), png_with(chunk(b"tEXt", b"Software\0x"))):
        assert image_size(content) == (30, 20)
    assert image_size(with_exif("PNG", 6)) == image_size(with_exif("JPEG", 6)) == (20, 30)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_no_damage_to_a_header_stops_the_index() -> None:
    rng = random.Random(0)
    for _ in range(300):
        content = bytearray(encoded(rng.choice(("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "ICO"))))
        for _ in range(3):
            content[rng.randrange(min(len(content), 60))] = rng.randrange(256)
        size = image_size(bytes(content))
        assert size is None or all(isinstance(side, int) for side in size)
