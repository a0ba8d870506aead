"""Stamps: which image files may have changed."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

import pytest

from lookonce.datasets.stamps import TICK_S, stamp, stamps

LONG_AGO = 10**9


def old_file(path: Path, content: bytes = b"image", seconds: float = LONG_AGO) -> Path:
    path.write_bytes(content)
    os.utime(path, (seconds, seconds))
    return path


def test_a_stamp_is_size_and_modification_time(tmp_path):
    assert stamp(old_file(tmp_path / "a.jpg")) == (5, LONG_AGO * 10**9)


@pytest.mark.parametrize(("age", "has_one"), [(TICK_S / 2, False), (TICK_S + 5, True), (-100, False)])
def test_a_file_that_was_just_written_has_no_stamp(tmp_path, age, has_one):
    assert bool(stamp(old_file(tmp_path / "a.jpg", seconds=time.time() - age))) is has_one


@pytest.mark.parametrize("name", ["gone.jpg", "folder/below/a.jpg", "null\0.jpg", "a.jpg/below.jpg"])
def test_a_missing_file_has_no_stamp(tmp_path, name):
    old_file(tmp_path / "a.jpg")
    assert stamps([tmp_path / name]) == {tmp_path / name: None}


def test_images_in_an_archive_have_the_stamp_of_the_archive(tmp_path):
    image, archive = old_file(tmp_path / "a.jpg"), tmp_path / "frames.tar"
    with tarfile.open(archive, "w") as file:
        file.add(image, "a.jpg")
    old_file(archive, archive.read_bytes(), LONG_AGO + 1)
    members = [archive / name for name in ("a.jpg", "b.jpg")]
    found = stamps([*members, image])
    assert found == {image: (5, LONG_AGO * 10**9)} | dict.fromkeys(members, stamp(archive))
    assert found[members[0]] == (archive.stat().st_size, (LONG_AGO + 1) * 10**9)
