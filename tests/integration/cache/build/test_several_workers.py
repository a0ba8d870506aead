"""Several builds of one cache: they share the work, wait for each other, and take over from dead workers."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from lookonce.cache.build import worker as build_module
from lookonce.cache.store.claims import Claims
from lookonce.cache.store.metadata import has_receipt, read_plan
from lookonce.cache.store.shards import remove_leftovers
from lookonce.claim_file import Process
from lookonce.files import TEMPORARY_MARK

pytestmark = pytest.mark.usefixtures("no_fsync")

NUM_IMAGES = 8
ELSEWHERE = replace(Process.this(), machine="elsewhere", name="elsewhere")
"""A worker on another machine: only its claim shows whether it is alive."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "POLL_S", 0.02)


def test_two_builds_at_once_share_the_work_and_both_end_with_a_complete_cache(site, images):
    site.build(images, root="undisturbed")
    towers = [site.Tower(on_image=lambda number: time.sleep(0.02)) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        reports = list(threads.map(lambda tower: site.build(images, tower), towers))
    assert sum(tower.num_encoded for tower in towers) == NUM_IMAGES
    assert all(report.num_encoded for report in reports)
    for report, tower, other in zip(reports, towers, reversed(towers), strict=True):
        assert (report.num_encoded, report.num_by_others) == (tower.num_encoded, other.num_encoded)
        assert report.num_missing == 0
    assert site.stored() == site.stored("undisturbed")
    assert not site.leftovers()


def test_workers_start_at_different_shards(site, images):
    plan = None
    built = []
    for number in range(3):
        with pytest.raises(site.PowerCut):
            site.build(images, site.Tower(6), worker=(number, 3), root=f"caches-{number}")
        folder = site.folder(f"caches-{number}")
        plan = plan or read_plan(folder)
        built.append([shard.name for shard in plan.shards if has_receipt(folder, shard.name)])
    names = [shard.name for shard in plan.shards]
    starts = [number * len(names) // 3 for number in range(3)]
    assert [shards[0] for shards in built] == [names[start] for start in starts]


def test_a_build_that_does_not_wait_skips_shards_of_other_workers(site, images):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(0))
    [shard, *_] = read_plan(site.folder()).shards
    with Claims(site.folder(), ELSEWHERE) as others:
        assert others.take(shard.name, 1)
        report = site.build(images, wait=False)
    assert report.num_missing == len(shard.keys)
    assert report.num_encoded == NUM_IMAGES - len(shard.keys)
    assert site.build(images, wait=False).num_missing == 0


def test_a_build_waits_for_others_and_takes_over_when_they_die(site, images):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(0))
    [shard, *_] = read_plan(site.folder()).shards
    claim = Claims(site.folder(), ELSEWHERE).take(shard.name, 1)  # without a heartbeat
    assert claim
    report = site.build(images, expiry_s=0.3)
    assert (report.num_encoded, report.num_missing) == (NUM_IMAGES, 0)
    assert not claim.is_held()
    assert not site.leftovers()


def test_a_suspended_worker_whose_shard_was_taken_over_continues_with_others(site, images):
    """The other worker has removed its file, and is still building the shard when it wakes."""
    site.build(images, root="undisturbed")
    others, taken = Claims(site.folder(), ELSEWHERE), []

    def sleep(number: int) -> None:
        unfinished = list(site.folder().glob(f"shards/*{TEMPORARY_MARK}*"))
        if unfinished and not taken:
            shard = unfinished[0].name.split(".")[0]
            os.utime(site.folder() / "claims" / f"{shard}.json", (1, 1))
            taken.append(others.take(shard, 1))
            remove_leftovers(site.folder(), shard)

    report = site.build(images, site.Tower(on_image=sleep), wait=False)
    assert 0 < report.num_missing < NUM_IMAGES
    assert taken[0].is_held()
    taken[0].release()
    assert site.build(images).num_missing == 0
    assert site.stored() == site.stored("undisturbed")
    assert not site.leftovers()


def test_a_suspended_worker_that_was_overtaken_keeps_the_receipts_of_others(site, images):
    def sleep(number: int) -> None:
        if number == 1:
            for claim in (site.folder() / "claims").iterdir():
                os.utime(claim, (1, 1))
            site.build(images)
            before.append(site.stamps())

    before = []
    report = site.build(images, site.Tower(on_image=sleep))
    assert (report.num_encoded, report.num_by_others) == (0, NUM_IMAGES)
    assert site.stamps() == before[0]
    assert not site.leftovers()
