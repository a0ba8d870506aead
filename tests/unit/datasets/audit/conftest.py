"""Files to audit: images of one colour, records about them, and helpers as fixtures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.rows import png, write_lines

from lookonce.datasets.audit.audit import Audit, audit
from lookonce.datasets.audit.findings import Corpus, Finding


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with four images, of which `b.png` and `copy.png` have the same bytes."""
    for name, color in {"a": 1, "b": 2, "c": 3, "copy": 2}.items():
        (tmp_path / f"{name}.png").write_bytes(png(color, (48, 40)))
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Callable[..., Path]:
    """A function that writes records into the folder: objects, or rows of image, question and answer."""
    keys = ("image_filename", "question", "answer")

    def write(*rows: object, name: str = "train") -> Path:
        lines = [dict(zip(keys, row, strict=True)) if isinstance(row, tuple) else row for row in rows]
        return write_lines(folder / f"{name}.jsonl", *lines)

    return write


@pytest.fixture(scope="session")
def look() -> Callable[..., Audit]:
    """A function that audits records files."""
    return lambda *paths, **options: audit(Corpus.read(paths, **options))


@pytest.fixture
def look_at(write: Callable[..., Path], look: Callable[..., Audit]) -> Callable[..., Audit]:
    """A function that audits one file with these records."""
    return lambda *rows, **options: look(write(*rows), **options)


@pytest.fixture(scope="session")
def finding_of() -> Callable[[Audit, str], Finding]:
    """A function that returns the only finding of an audit with a code."""

    def finding_of(result: Audit, code: str) -> Finding:
        [finding] = [finding for finding in result.findings if finding.code == code]
        return finding

    return finding_of
