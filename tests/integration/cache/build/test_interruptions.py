"""A build that a signal or a full disk stops: it leaves no partial files, loses at most a shard, and can be resumed."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.processes import NOTICE, WARNING, send

from lookonce import disk_space as space
from lookonce.cache.build import worker as build_module
from lookonce.cache.build.encode import MAX_ON_DEVICE
from lookonce.cache.store.claims import Claims
from lookonce.cache.store.metadata import read_plan
from lookonce.cache.store.reader import VisionCache
from lookonce.claim_file import Process
from lookonce.errors import DiskFull, Stopped
from lookonce.files import TEMPORARY_MARK
from lookonce.run.open import TO_BUILD, open_run

pytestmark = pytest.mark.usefixtures("one_tower", "no_fsync", "restored_handlers")

NUM_IMAGES = 8


@pytest.mark.parametrize(
    ("signals", "finishes"),
    [([NOTICE], True), ([WARNING], False), ([NOTICE, NOTICE], False), ([NOTICE, WARNING], False)],
)
def test_a_stopped_build_leaves_no_partial_files_and_the_next_one_resumes(site, images, signals, finishes):
    site.build(images, root="undisturbed")
    shards = read_plan(site.folder("undisturbed")).shards
    in_second = len(shards[0].keys) + 1 + MAX_ON_DEVICE  # encoded just after the first shard was finished
    tower = site.Tower(on_image=lambda number: send(*signals) if number == in_second else None)
    with pytest.raises(Stopped, match=rf"stopped by {signals[0].name} after \d shards?, \d of {len(shards)} are left"):
        site.build(images, tower)
    assert not site.leftovers()
    names = sorted(path.stem for path in site.folder().glob("receipts/*"))
    assert names == [shard.name for shard in shards[: len(names)]]
    assert len(names) == (2 if finishes else 1)

    resumed = site.build(images)
    assert resumed.num_encoded == NUM_IMAGES - sum(len(shard.keys) for shard in shards[: len(names)])
    assert site.stored() == site.stored("undisturbed")


def test_a_build_that_waits_for_others_stops_on_a_signal(site, images, monkeypatch):
    monkeypatch.setattr(build_module, "POLL_S", 0.02)
    shards = site.plan_of(images)
    others = Claims(site.folder(), replace(Process.this(), machine="elsewhere"))
    claims = [others.take(shard.name, 1) for shard in shards]
    timer = threading.Timer(0.2, send, [WARNING])
    timer.start()
    start = time.monotonic()
    with pytest.raises(Stopped, match="stopped by SIGTERM after 0 shards"):
        site.build(images, site.no_tower)
    timer.join()
    assert 0.1 < time.monotonic() - start < 10
    assert all(claim.is_held() for claim in claims)


SLOW_BUILD = """
import time
from lookonce.cache.build import encode
from lookonce.cache.model.tower import Tower
from lookonce.cli import main

encode.num_workers = lambda device: 2  # as with a GPU
encode = Tower.encode

def slowly(self, *arguments):
    time.sleep(0.03)
    return encode(self, *arguments)

Tower.encode = slowly
main(["cache", "build", "run.yaml"])
"""


@pytest.fixture
def slow(make_run, preloaded, tmp_path):
    """A run, the folder of its cache, and a build of it that is in its first shard, with processes that decode."""
    run = make_run()
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    folder = open_run(run, TO_BUILD).cache_folder
    build = preloaded.start(SLOW_BUILD, folder=tmp_path)
    build.wait_until(lambda: list(folder.glob(f"shards/*{TEMPORARY_MARK}*")))
    return run, folder, build


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_process_group_stops_a_build_cleanly(slow, number):
    run, folder, build = slow
    os.killpg(build.pid, number)
    assert build.wait() == 75 and "Traceback" not in build.error, build.error
    assert f"stopped by {number.name}" in build.error and "run the same command again to resume" in build.error
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*")) and not list((folder / "claims").iterdir())
    report = open_run(run, TO_BUILD).build()
    assert (report.num_missing, report.quarantined) == (0, {})
    assert report.num_encoded + report.num_reused == report.num_wanted
    assert (report.num_reused > 0) == (number == signal.SIGUSR1)


def test_a_worker_process_that_was_killed_is_named_with_a_cause(slow):
    """Linux kills processes if there is no memory left."""
    run, _, build = slow
    psutil.Process(build.pid).children()[0].kill()
    assert build.wait() == 1 and "Traceback" not in build.error, build.error
    named = "Error: out of memory: (DataLoader worker|a worker process that decodes)"
    assert re.search(named, build.error), build.error
    assert open_run(run, TO_BUILD).build().num_missing == 0


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
    sizes = [shard.num_tokens * site.fingerprint.bytes_per_token for shard in site.plan_of(images)]
    with largest_file(max(sizes)), pytest.raises(DiskFull, match=r"are free but were refused \(File too large"):
        site.build(images)
    assert not site.leftovers()
    resumes(site, images, site.stamps())


@pytest.mark.parametrize(
    ("call", "num_given", "error"),
    [("pwrite", 9, errno.ENOSPC), ("fsync", 9, errno.EDQUOT), ("replace", 1, errno.EFBIG)],
)
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
