"""A disk that fills up during a build is reported, and costs the build at most the current shard."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from pathlib import Path

import pytest

from lookonce import disk_space as space
from lookonce.cache.store.metadata import read_plan
from lookonce.cache.store.reader import VisionCache
from lookonce.errors import DiskFull

pytestmark = pytest.mark.usefixtures("no_fsync")

NUM_IMAGES = 8
Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """No minimal margin, which is small beside shards of real size."""
    monkeypatch.setattr(space, "MIN_MARGIN_BYTES", 0)


@pytest.mark.guarantee("A full disk ends a build at the boundary of a shard, and the next build resumes.")
def test_a_shard_without_room_is_not_begun_and_the_current_one_is_finished(site, images, monkeypatch):
    def usage(folder: Path) -> Usage:
        return Usage(10**12, 0, 0 if tower.num_encoded else 10**12)

    tower = site.Tower()
    monkeypatch.setattr("shutil.disk_usage", usage)
    with pytest.raises(DiskFull):
        site.build(images, tower)
    assert 0 < len(VisionCache.open(site.folder())) == tower.num_encoded < NUM_IMAGES
    assert not site.leftovers()
    monkeypatch.undo()
    assert site.build(images).num_encoded == NUM_IMAGES - tower.num_encoded


def resumes(site, images, kept: dict[Path, tuple[int, bytes]]) -> None:
    """Check that the same call, with room, keeps finished shards and ends with the same tensors."""
    num_kept = len(VisionCache.open(site.folder()))
    report = site.build(images)
    assert report.num_encoded == NUM_IMAGES - num_kept
    assert site.stamps().items() >= kept.items()
    site.build(images, root="undisturbed")
    assert site.stored() == site.stored("undisturbed")


@pytest.mark.guarantee("A full disk ends a build at the boundary of a shard, and the next build resumes.")
def test_a_disk_that_fills_up_during_a_build_costs_the_current_shard(site, images, narrow, small_disk):
    site.path = small_disk.folder
    ballast = []

    def on_image(number: int) -> None:
        if number == 6:  # a file of another user
            ballast.append(small_disk.fill(leave=200_000))

    with pytest.raises(DiskFull, match=r"bytes\) are missing"):
        site.build(images, site.Tower(on_image=on_image))
    kept = site.stamps()
    assert 0 < len(VisionCache.open(site.folder())) < NUM_IMAGES
    assert not site.leftovers()
    with pytest.raises(DiskFull, match=r"bytes\) are missing"):  # not yet
        site.build(images, site.no_tower)
    ballast[0].unlink()
    resumes(site, images, kept)


@pytest.mark.parametrize("step", ["plan", "summary"])
def test_a_full_disk_before_or_after_the_shards_is_reported_alike(site, images, narrow, small_disk, step):
    site.path = small_disk.folder
    (small_disk.folder / "bad.jpg").write_text("no image")
    images = site.index(*images.key_of, small_disk.folder / "bad.jpg")
    if step == "summary":
        site.build(images)
        (site.folder() / "quarantine.jsonl").unlink()
    ballast = small_disk.fill(leave=0)
    with pytest.raises(DiskFull, match="no room for the rest of"):
        site.build(images, site.no_tower)
    ballast.unlink()
    assert site.build(images).num_missing == 0
    assert not site.leftovers()


def test_a_limit_on_file_sizes_is_named_and_costs_the_current_shard(site, images, largest_file):
    sizes = [shard.num_tokens * site.fingerprint.bytes_per_token for shard in plan_of(site, images)]
    with largest_file(max(sizes)), pytest.raises(DiskFull, match=r"are free but were refused \(File too large"):
        site.build(images)
    assert not site.leftovers()
    resumes(site, images, site.stamps())


def plan_of(site, images):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(0))
    return read_plan(site.folder()).shards


CALLS = {"write": ("pwrite", 9), "flush": ("fsync", 9), "rename": ("replace", 1)}
"""The call that is refused, and after how many calls."""


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(("call", "num_given"), CALLS.values(), ids=CALLS)
def test_a_full_disk_is_reported_for_every_step_of_writing(site, images, monkeypatch, call, num_given, error):
    real, calls = getattr(os, call), []

    def refuse(*args, **options):
        calls.append(1)
        if len(calls) > num_given:
            raise OSError(error, os.strerror(error))
        return real(*args, **options)

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(DiskFull):
        site.build(images)
    monkeypatch.undo()
    assert not [path for path in site.leftovers() if path.suffix != ".safetensors"]  # a shard may lack its receipt
    resumes(site, images, {path: was for path, was in site.stamps().items() if path.parent.name == "receipts"})
    assert not site.leftovers()


def test_other_errors_of_the_disk_are_raised_unchanged(site, images, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("lookonce.cache.store.shards.write_all", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        site.build(images)
    assert not site.leftovers()
