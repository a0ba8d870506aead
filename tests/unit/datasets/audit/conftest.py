"""Files to audit: images of one colour, records about them, and helpers as fixtures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from PIL import Image

from lookonce.datasets.audit.audit import Audit, audit
from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.audit.findings import Finding


def make_picture(seed: int, size: tuple[int, int] = (48, 40)) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", size, (seed % 256, seed // 256, 7)).save(target, "PNG")
    return target.getvalue()


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    """A function that makes a PNG of one colour, which depends on the seed."""
    return make_picture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with four images, of which `b.png` and `copy.png` have the same bytes."""
    for name, seed in {"a": 1, "b": 2, "c": 3, "copy": 2}.items():
        (tmp_path / f"{name}.png").write_bytes(make_picture(seed))
    return tmp_path


@pytest.fixture(scope="session")
def write() -> Callable[[Path, Iterable[tuple[str, str, str]]], Path]:
    """A function that writes a records file of rows of image, question and answer."""

    def write(path: Path, rows: Iterable[tuple[str, str, str]]) -> Path:
        lines = [{"image_filename": image, "question": q, "answer": a} for image, q, a in rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


@pytest.fixture(scope="session")
def look() -> Callable[..., Audit]:
    """A function that audits records files."""
    return lambda *paths, **options: audit(Corpus.read(paths, **options))


@pytest.fixture(scope="session")
def finding_of() -> Callable[[Audit, str], Finding]:
    """A function that returns the only finding of an audit with a code."""

    def finding_of(result: Audit, code: str) -> Finding:
        [finding] = [finding for finding in result.findings if finding.code == code]
        return finding

    return finding_of
