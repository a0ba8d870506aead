"""Fixtures of preparation: a source with four questions about each image, and what is prepared from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.rows import jpeg_of, write_parquet

from lookonce.datasets.prepare.run import Options, Prepared, prepare

QUESTIONS = ["Is there text?", "How many instrumnets are in the image?", "What type of polyp is present?", "none"]
ANSWERS = ["yes", "lower-rigth;center", "nan", "none"]


def write(folder: Path, num_images: int = 12, num_files: int = 4, **options: Any) -> Path:
    """Parquet files of four questions about each image; two images have the same bytes."""
    rows = [
        {"image": image, "source": "s", "question": question, "answer": answer, "img_id": f"cl{number}"}
        for number in range(num_images)
        for image in [{"bytes": jpeg_of(max(number, 1)), "path": None}]
        for question, answer in [*zip(QUESTIONS, ANSWERS, strict=True), (QUESTIONS[2], "paris is")]
    ]
    each = len(rows) // num_files
    for number in range(num_files):
        write_parquet(folder / f"{number:05d}.parquet", rows[number * each : (number + 1) * each], **options)
    return folder


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, which must not change it."""
    return write(tmp_path_factory.mktemp("source") / "in")


@pytest.fixture
def made(tmp_path: Path, source: Path) -> Callable[..., Prepared]:
    """Prepares Kvasir-VQA from that source, or from another, into a folder."""

    def made(name: str = "out", source: Path = source, **options: Any) -> Prepared:
        return prepare("kvasir-vqa", tmp_path / name, Options(str(source), **options))

    return made
