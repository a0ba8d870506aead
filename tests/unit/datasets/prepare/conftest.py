"""Fixtures of preparation: image bytes, and a source with four questions about each image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lookonce.datasets.prepare.run import Options, Prepared, prepare

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
QUESTIONS = ["Is there text?", "How many instrumnets are in the image?", "What type of polyp is present?", "none"]
ANSWERS = ["yes", "lower-rigth;center", "nan", "none"]


def jpeg_of(name: object) -> bytes:
    return b"\xff\xd8\xff\xe0" + f"image {name} ".encode() * 40


def write(folder: Path, num_images: int = 12, num_files: int = 4, **options: Any) -> Path:
    """Parquet files of four questions about each image; two images have the same bytes."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(num_images):
        image = {"bytes": jpeg_of(max(number, 1)), "path": None}
        for question, answer in [*zip(QUESTIONS, ANSWERS, strict=False), (QUESTIONS[2], "paris is")]:
            rows.append(
                {"image": image, "source": "s", "question": question, "answer": answer, "img_id": f"cl{number}"}
            )
    schema = pa.schema([(name, EMBEDDED if name == "image" else pa.string()) for name in rows[0]])
    each = len(rows) // num_files
    for number in range(num_files):
        table = pa.Table.from_pylist(rows[number * each : (number + 1) * each], schema=schema)
        parquet.write_table(table, folder / f"{number:05d}.parquet", **options)
    return folder


@pytest.fixture(scope="session")
def jpeg() -> Callable[[object], bytes]:
    """Makes bytes that begin like a JPEG and are unique to a name."""
    return jpeg_of


@pytest.fixture(scope="session")
def write_source() -> Callable[..., Path]:
    """Writes a source into a folder; further options are of pyarrow's `write_table`."""
    return write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in")


@pytest.fixture
def made(tmp_path: Path, source: Path) -> Callable[..., Prepared]:
    return lambda name="out", **options: prepare("kvasir-vqa", tmp_path / name, Options(str(source), **options))
