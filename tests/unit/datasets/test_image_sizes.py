"""Image sizes are read from headers, whatever the damage."""

from __future__ import annotations

import hashlib
import io
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_no_damage_to_a_header_stops_the_index() -> None:
    rng = random.Random(0)
    for _ in range(300):
        content = bytearray(encoded(rng.choice(("JPEG", "PNG", "WEBP", "TIFF", "BMP", "PPM", "ICO"))))
        for _ in range(3):
            content[rng.randrange(min(len(content), 60))] = rng.randrange(256)
        size = image_size(bytes(content))
        assert size is None or all(isinstance(side, int) for side in size)
