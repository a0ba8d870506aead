"""Files of records and images, and the command line."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from click.testing import CliRunner, Result
from PIL import Image
from pyarrow import parquet

from lookonce.cli import main

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
"""A column of images as the `datasets` library writes it."""


def run(*words: object) -> Result:
    """What `lookonce` does with these words."""
    return CliRunner().invoke(main, [*map(str, words)])


def write_lines(path: Path, *rows: Any) -> Path:
    """Write a JSONL file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], types: Mapping[str, Any] = {}, **options: Any) -> None:
    """Write a parquet file, of texts but for embedded images and the columns with types; its folder is made."""
    kinds = {"image": EMBEDDED, **types}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in rows[0]])
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, format, **options)
    return target.getvalue()


def png(color: int = 0, size: tuple[int, int] = (40, 40)) -> bytes:
    """A PNG of one colour, which depends on the number."""
    return encoded(Image.new("RGB", size, (color % 256, color // 256, 7)), "PNG")


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of 8 x 8 pixels whose header claims another size."""
    content = png(size=(8, 8))
    header = b"IHDR" + struct.pack(">II", width, height) + content[24:29]
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


def jpeg_of(name: object) -> bytes:
    """Bytes that begin like a JPEG and are unique to a name."""
    return b"\xff\xd8\xff\xe0" + f"image {name} ".encode() * 40


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def alternating(*contents: Any) -> list[dict[str, Any]]:
    """Alternating messages of user and assistant."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def parts(*contents: str | None) -> list[dict[str, str]]:
    """Text parts, and an image part for each None."""
    return [{"type": "image", "path": "a.jpg"} if c is None else {"type": "text", "text": c} for c in contents]
