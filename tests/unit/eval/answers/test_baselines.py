"""Shuffled images: every question gets another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.questions import shuffle_images


@pytest.mark.parametrize("num_images", [2, 3, 10])
def test_every_shuffled_image_has_other_content(num_images):
    """Also where two files have the same bytes."""
    key_of = {Path(f"{number}{suffix}.jpg"): str(number) for number in range(num_images) for suffix in ("", "-copy")}
    images = ImageIndex(key_of, {key: path for path, key in key_of.items()})
    records = [Record((path,), (Turn("q", str(path)),), origin=str(path)) for path in images.key_of]
    shuffled = shuffle_images(records, images)
    pairs = list(zip(records, shuffled, strict=True))
    assert all(images.key_of[a.images[0]] != images.key_of[b.images[0]] for a, b in pairs)
    assert {images.key_of[r.images[0]] for r in shuffled} == set(images.path_of)
    assert all((a.turns, a.origin) == (b.turns, b.origin) for a, b in pairs)
