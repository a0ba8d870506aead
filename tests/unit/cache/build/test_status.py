"""Progress and workers of a cache, from receipts and claims that others are writing."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from lookonce.cache.build import progress as module
from lookonce.cache.build.progress import StatusReport, WorkerStatus, status
from lookonce.cache.store.claims import Claims
from lookonce.cache.store.metadata import read_receipts, receipt_path
from lookonce.claim_file import Process
from lookonce.errors import CacheCorrupt
from lookonce.run.open import TO_BUILD, open_run

NUM_IMAGES = 8
ME = Process.this("1/4")


def interrupt(site, images) -> int:
    """A build that dies; returns the number of stored images."""
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(5))
    return len(site.stored())


def test_before_a_build_nothing_is_stored_and_no_folder_is_created(site, images):
    report = status(site.folder(), images.path_of)
    assert report == StatusReport(site.folder(), NUM_IMAGES, 0, 0, 0, 0, 0.0, 0.0, None, [])
    assert report.num_missing == NUM_IMAGES
    assert not site.folder().exists()


def test_after_a_build_everything_is_stored(site, images):
    built = site.build(images)
    report = status(site.folder(), images.path_of)
    assert (report.num_images, report.num_done, report.num_missing) == (NUM_IMAGES, NUM_IMAGES, 0)
    assert (report.num_shards, report.num_bytes) == (built.num_shards, built.size_bytes)
    assert report.encode_seconds == sum(receipt.seconds for receipt in read_receipts(site.folder()))
    assert (report.images_per_second, report.eta_s, report.workers) == (0.0, None, [])


def test_an_interrupted_build_counts_its_finished_shards(site, images):
    num_done = interrupt(site, images)
    report = status(site.folder(), images.path_of)
    assert 0 < report.num_done == num_done < NUM_IMAGES
    assert report.num_bytes == sum(path.stat().st_size for path in (site.folder() / "shards").iterdir())


def test_bad_images_are_counted_apart_including_those_to_be_retried(site, images):
    (site.path / "text.jpg").write_text("no image")
    more = site.index(*images.key_of, site.path / "text.jpg")
    lost = more.path_of[sorted(images.path_of)[0]]
    content = lost.read_bytes()
    lost.unlink()
    site.build(more)
    report = status(site.folder(), more.path_of)
    assert (report.num_images, report.num_done, report.num_quarantined, report.num_missing) == (9, 7, 2, 0)
    lost.write_bytes(content)
    site.build(more)
    report = status(site.folder(), more.path_of)
    assert (report.num_done, report.num_quarantined, report.num_missing) == (8, 1, 0)
    assert "8 of 9 encoded, complete but for those in quarantine" in report.text()


def test_only_the_images_asked_for_are_counted(site, images):
    site.build_once(images)
    report = status(site.folder(), [*list(images.path_of)[:2], "f" * 64])
    assert (report.num_images, report.num_done, report.num_missing) == (3, 2, 1)


def test_workers_are_reported_with_their_current_shards(site, images):
    interrupt(site, images)
    with Claims(site.folder(), ME) as mine, Claims(site.folder(), replace(ME, name="2/4", born=0.0)) as dead:
        claim = mine.take("shard-00003", 2)
        claim.update("encoding", 1)
        claim.beat()
        dead.take("shard-00002", 5)
        report = status(site.folder(), images.path_of)
    [second, first] = report.workers
    assert first == WorkerStatus(
        "1/4", ME.host, ME.job, "shard-00003", "encoding", 1, 2, first.age_s, first.silent_s, True
    )
    assert 0 <= first.age_s < 60 and 0 <= first.silent_s < 60
    assert (second.worker, second.shard, second.phase, second.alive) == ("2/4", "shard-00002", "starting", False)


@pytest.mark.parametrize(("expiry_s", "alive"), [(1000, True), (50, False)])
def test_a_worker_whose_claim_has_expired_is_dead(site, images, expiry_s, alive):
    interrupt(site, images)
    with Claims(site.folder(), ME, expiry_s=10**6) as mine:
        mine.take("shard-00003", 2)
        path = site.folder() / "claims" / "shard-00003.json"
        then = path.stat().st_mtime - 100
        os.utime(path, (then, then))
        [worker] = status(site.folder(), images.path_of, expiry_s).workers
    assert worker.alive == alive
    assert 100 <= worker.silent_s < 110


@pytest.mark.parametrize(
    ("age_s", "num_images", "slow"),
    [(170, 20, False), (190, 20, True), (190, 40, False), (50, 1, False), (61, 1, True)],
)
def test_a_worker_is_slow_after_three_times_the_median_time(site, images, monkeypatch, age_s, num_images, slow):
    interrupt(site, images)
    found = [replace(receipt, seconds=3.0 * len(receipt.images)) for receipt in read_receipts(site.folder())]
    monkeypatch.setattr(module, "read_receipts", lambda folder: found)
    with Claims(site.folder(), ME) as mine:
        claim = mine.take("shard-00003", num_images)
        claim.work = replace(claim.work, started=time.time() - age_s)
        claim.beat()
        report = status(site.folder(), images.path_of)
    [worker] = report.workers
    assert (worker.slow, worker.state) == (slow, "slow" if slow else "")
    assert ("1/4 (slow)" in report.text()) == slow


def test_no_worker_is_slow_before_a_shard_is_finished(site, images):
    with Claims(site.folder(), ME) as mine:
        claim = mine.take("shard-00000", 2)
        claim.work = replace(claim.work, started=time.time() - 10_000)
        claim.beat()
        [worker] = status(site.folder(), images.path_of).workers
    assert worker.state == ""


def test_an_empty_claim_is_an_unknown_worker(site, images):
    interrupt(site, images)
    (site.folder() / "claims" / "shard-00003.json").write_text("")
    [worker] = status(site.folder(), images.path_of).workers
    assert (worker.worker, worker.shard, worker.age_s, worker.alive) == ("unknown", "shard-00003", 0.0, True)


@pytest.mark.parametrize(
    ("finished_ago", "worker", "rate"),
    [
        ([10, 40], ME, 20 / 50),  # the first was started 10 s before it was finished
        ([10, 2 * module.WINDOW_S], ME, 10 / 20),
        ([2 * module.WINDOW_S], ME, 0.0),
        ([10, 40], replace(ME, born=0.0), 0.0),
        ([10, 40], None, 0.0),
        ([], ME, 0.0),
    ],
)
def test_the_rate_is_that_of_the_last_hour_while_a_worker_lives(site, images, monkeypatch, finished_ago, worker, rate):
    interrupt(site, images)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    [some, *_] = read_receipts(site.folder())
    [entry, *_] = some.images.values()
    receipts = [
        replace(some, images={f"{number}": entry for number in range(10)}, finished=now - ago, seconds=10.0)
        for ago in finished_ago
    ]
    monkeypatch.setattr(module, "read_receipts", lambda folder: receipts)
    with Claims(site.folder(), worker or ME) as claims:
        if worker:
            claims.take("shard-00003", 1)
        report = status(site.folder(), images.path_of)
    assert report.images_per_second == pytest.approx(rate)
    assert report.eta_s == (pytest.approx(NUM_IMAGES / rate) if rate else None)


def test_a_damaged_receipt_is_an_error(site, images):
    site.build_once(images)
    path = receipt_path(site.folder(), "shard-00000")
    path.write_text(path.read_text().replace("shard-00000", "shard-00001"))
    with pytest.raises(CacheCorrupt, match=r"shard-00000\.json is damaged"):
        status(site.folder(), images.path_of)


def test_the_status_of_a_run_uses_its_expiry(make_run):
    inputs = open_run(make_run(cache={"claim_s": 50.0}), TO_BUILD)
    inputs.write_plan()
    assert (inputs.status().num_images, inputs.status().num_done) == (inputs.images.num_distinct, 0)
    with Claims(inputs.cache_folder, ME, expiry_s=10**6) as mine:
        mine.take("shard-00000", 2)
        os.utime(inputs.cache_folder / "claims" / "shard-00000.json", (1, 1))
        assert not inputs.status().workers[0].alive


def test_the_text_of_a_status_report(tmp_path):
    ended = StatusReport(tmp_path, 6500, 6400, 2, 3, 4_200_000_000, 3725.0, 0.0, None, [])
    assert ended.text().splitlines() == [
        "  images       6,400 of 6,500 encoded, 98 still to encode",
        "  quarantined  2",
        "  shards       3, 4.2 GB, encoded in 1 h 2 min",
        f"  folder       {tmp_path}",
    ]
    workers = [
        WorkerStatus("0/16", "node7", "77_0", "shard-00003", "encoding", 12, 51, 30.0, 4.0, True),
        WorkerStatus("node8:4711", "node8", "", "shard-00004", "starting", 0, 48, 4020.0, 200.0, False),
    ]
    running = replace(ended, images_per_second=24.5, eta_s=4.0, workers=workers)
    assert running.text().splitlines() == [
        "  images       6,400 of 6,500 encoded, 98 still to encode",
        "  quarantined  2",
        "  shards       3, 4.2 GB, encoded in 1 h 2 min",
        "  rate         24.5 images/s, done in 4.0 s",
        f"  folder       {tmp_path}",
        "",
        "worker             where        shard           phase        for       heartbeat",
        "0/16                77_0  shard-00003  encoding 12/51     30.0 s       4.0 s ago",
        "node8:4711 (dead)  node8  shard-00004   starting 0/48  1 h 7 min  3 min 20 s ago",
    ]
