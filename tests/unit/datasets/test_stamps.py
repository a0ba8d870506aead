"""Stamps: which image files may have changed."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

import pytest

import lookonce.datasets.images
from lookonce.datasets.images import TICK_S, stamp, stamps

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
    monkeypatch.setattr(lookonce.datasets.images, "now", lambda: path.stat().st_ctime + age)
    assert bool(stamp(path)) is has_one
    os.utime(path, (time.time() + 100,) * 2)
    assert not stamp(path)


@pytest.mark.parametrize("name", ["gone.jpg", "folder/below/a.jpg", "null\0.jpg", "a.jpg/below.jpg"])
def test_a_missing_file_has_no_stamp(tmp_path, name):
    old_file(tmp_path / "a.jpg")
    assert stamps([tmp_path / name]) == {tmp_path / name: None}


def test_images_in_an_archive_have_the_stamp_of_the_archive(tmp_path, files_are_old):
    image, archive = old_file(tmp_path / "a.jpg"), tmp_path / "frames.tar"
    with tarfile.open(archive, "w") as file:
        file.add(image, "a.jpg")
    old_file(archive, archive.read_bytes(), LONG_AGO + 1)
    members = [archive / name for name in ("a.jpg", "b.jpg")]
    found = stamps([*members, image])
    assert found == {image: stamp(image)} | dict.fromkeys(members, stamp(archive))
    assert found[members[0]][:2] == (archive.stat().st_size, (LONG_AGO + 1) * 10**9)
