"""Free space is checked in advance, and errors of a full disk name it."""

from __future__ import annotations

import contextlib
import errno
from collections import namedtuple
from pathlib import Path

import pytest

from lookonce import disk_space as space
from lookonce.cache.store.metadata import read_plan
from lookonce.disk_space import check_room, disk_full, with_margin
from lookonce.errors import DiskFull

NUM_IMAGES = 8
Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No minimal margin, which is small beside shards of real size."""
    monkeypatch.setattr(space, "MIN_MARGIN_BYTES", 0)


# Before a build.


@pytest.mark.parametrize(
    ("num_bytes", "num_free", "fits"),
    [
        (1, space.MIN_MARGIN_BYTES, False),
        (1, space.MIN_MARGIN_BYTES + 1, True),
        (10**12, 10**12 + 2 * 10**10, True),
    ],
)
def test_there_must_be_room_for_the_margin_too(tmp_path, monkeypatch, num_bytes, num_free, fits):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(10**13, 0, num_free))
    with contextlib.nullcontext() if fits else pytest.raises(DiskFull) as caught:
        check_room(tmp_path, num_bytes)
    if not fits:
        missing = with_margin(num_bytes) - num_free
        assert f"({missing:,} bytes) are missing" in str(caught.value)


def test_the_message_names_what_is_missing_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(10**12, 0, 5 * 10**9))
    assert str(disk_full(tmp_path, 10**11)) == (
        f"no room for the rest of {tmp_path}: 102.0 GB are needed with a margin, 5.0 GB are free, 97.0 GB "
        "(97,000,000,000 bytes) are missing. Finished shards are kept: make room (`lookonce cache gc RUN.yaml` lists "
        "what can be deleted), choose another `cache.dir`, or halve the cache with `cache.dtype: fp8_e4m3`; then run "
        "the same command again"
    )
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(10**12, 0, 10**12))
    message = str(disk_full(tmp_path, 10**9, OSError(errno.EDQUOT, "Disk quota exceeded")))
    assert (
        "1.0 GB are needed with a margin, 1.0 TB are free but were refused (Disk quota exceeded; `quota -s`" in message
    )
    assert "missing" not in message


def test_a_build_that_does_not_fit_is_refused_before_the_tower_is_loaded(site, images, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(10**12, 0, 1000))
    with pytest.raises(DiskFull) as caught:
        site.build(images, site.no_tower)
    num_tokens = sum(shard.num_tokens for shard in read_plan(site.folder()).shards)
    needed = with_margin(num_tokens * site.fingerprint.bytes_per_token)
    assert f"{needed - 1000:,} bytes" in str(caught.value)
    assert not site.leftovers()


@pytest.mark.guarantee("A full disk ends a build at the boundary of a shard, and the next build resumes.")
def test_finished_shards_need_no_room(site, images, monkeypatch):
    site.build(images)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(10**12, 0, 0))
    assert site.build(images, site.no_tower).num_reused == NUM_IMAGES


# Libraries that hide the reason.


def written(folder: Path, error: Exception) -> None:
    with space.full_disk_named(folder, 10**6, "a checkpoint", lambda: "Make room"):
        raise error


def test_a_librarys_error_on_a_full_disk_names_the_disk(narrow, small_disk):
    ballast = small_disk.fill(leave=100_000)
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    with pytest.raises(DiskFull, match=r"no room for a checkpoint: 1.0 MB are .* bytes\) are missing. Make room"):
        written(small_disk.folder, error)
    ballast.unlink()
    with pytest.raises(RuntimeError, match="enforce fail"):
        written(small_disk.folder, error)
    assert list(small_disk.folder.iterdir()) == []


def test_errors_that_are_not_of_the_disk_stay_as_they_are(tmp_path):
    for error in (OSError(errno.EIO, "Input/output error"), ValueError("no"), DiskFull("said already")):
        with pytest.raises(type(error)) as caught:
            written(tmp_path, error)
        assert caught.value is error
