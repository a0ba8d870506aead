"""The plan of a build and its progress: what is planned, stored and pending, and which workers are at work."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.build import progress
from lookonce.cache.build.progress import (
    Finished,
    StatusReport,
    WorkerStatus,
    ensure_plan,
    index_from_plan,
    new_shards,
    pending_shards,
    status,
)
from lookonce.cache.store.claims import Claims
from lookonce.cache.store.metadata import (
    Entry,
    Failure,
    Plan,
    PlannedImage,
    Receipt,
    read_plan,
    read_receipts,
    write_receipt,
)
from lookonce.claim_file import Process
from lookonce.datasets.images import ImageIndex

TOKENS_PER_SHARD = 10
STAMP = (1000, 1, 1)


def image(name: str, num_tokens: int = 5) -> PlannedImage:
    return PlannedImage(name * 64, num_tokens, (f"/{name}.jpg",), (STAMP,))


def pictures(names: str) -> list[PlannedImage]:
    return [image(name) for name in names]


class Cache:
    """A cache folder with only a plan and receipts; a key is one letter 64 times."""

    def __init__(self, folder: Path, site) -> None:
        self.folder, self.fingerprint = folder, site.fingerprint
        self.shard_bytes = TOKENS_PER_SHARD * site.fingerprint.bytes_per_token

    def plan_for(self, images: list[PlannedImage], **options) -> list[str]:
        """Plan for images; returns the shards of the plan as letters."""
        return letters(ensure_plan(self.folder, images, self.fingerprint, self.shard_bytes, **options))

    def finish(self, number: int, failed: str = "", retry: str = "", names: str | None = None) -> None:
        shard = read_plan(self.folder).shards[number]
        failures = {name * 64: Failure("a.jpg", "why", name in retry) for name in failed + retry}
        keys = [name * 64 for name in names] if names is not None else shard.keys
        images = {key: Entry(0, 0, 5, (1, 2, 10), "0" * 16) for key in keys if key not in failures}
        write_receipt(self.folder, Receipt(shard.name, "", 0, 0, "", "", 0.0, 0.0, images, failures))

    def pending(self, names: str, former: str = "") -> list[str]:
        keys, others = ([name * 64 for name in letters] for letters in (names, former))
        return letters(Plan(tuple(pending_shards(self.plan, Finished.of(read_receipts(self.folder)), keys, others))))

    @property
    def plan(self) -> Plan:
        return read_plan(self.folder)


def letters(plan: Plan) -> list[str]:
    return ["".join(key[0] for key in shard.keys) for shard in plan.shards]


@pytest.fixture
def cache(site) -> Cache:
    return Cache(site.path / "cache", site)


@pytest.mark.parametrize(
    ("finished", "wanted", "former", "new", "pending"),
    [
        ({}, "abcd", "", [], ["ab", "cd"]),
        ({}, "abc", "", ["c"], ["ab", "c"]),  # there may be no file of d, so its shard cannot be built
        ({}, "d", "", ["d"], ["d"]),
        ({}, "abcdx", "", ["x"], ["ab", "cd", "x"]),
        ({0: {}}, "abcd", "", [], ["cd"]),
        ({0: {}, 1: {}}, "abcd", "", [], []),
        ({0: {}}, "a", "", [], []),
        ({0: {"failed": "a"}}, "abcd", "", [], ["cd"]),
        ({0: {"retry": "a"}}, "abcd", "", ["a"], ["cd", "a"]),
        ({0: {"failed": "b", "retry": "a"}}, "abcd", "", ["a"], ["cd", "a"]),
        ({0: {"names": "a"}}, "abcd", "", ["b"], ["cd", "b"]),  # a receipt without b
        # A planned shard is built without changed images, which have a former key, unless these are most.
        ({}, "acdx", "b", ["x"], ["ab", "cd", "x"]),
        ({}, "cdxy", "ab", ["xy"], ["cd", "xy"]),
        ({0: {}}, "acdx", "b", ["x"], ["cd", "x"]),
        ({0: {"retry": "b"}, 1: {}}, "acdx", "b", ["x"], ["x"]),
        ({0: {"names": "a"}}, "acdx", "b", ["x"], ["cd", "x"]),
    ],
)
def test_images_are_planned_that_are_wanted_and_neither_stored_nor_pending(
    cache, finished, wanted, former, new, pending
):
    planned = cache.plan_for(pictures("abcd"))
    for number, receipt in finished.items():
        cache.finish(number, **receipt)
    assert cache.plan_for(pictures(wanted), former=[name * 64 for name in former]) == planned + new
    assert cache.pending(wanted, former) == pending


def test_a_shard_whose_images_others_have_is_not_built(cache):
    cache.plan_for(pictures("ab"))
    assert cache.plan_for(pictures("a")) == ["ab", "a"]  # the file of b was missing
    cache.finish(0)
    assert cache.pending("ab") == []


def test_workers_of_different_runs_that_plan_at_once_plan_all_images(cache, monkeypatch):
    barrier, waited = threading.Barrier(4), threading.local()

    def read_together(folder: Path) -> Plan:
        plan = read_plan(folder)
        if not hasattr(waited, "once"):
            waited.once = barrier.wait()
        return plan

    monkeypatch.setattr(progress, "read_plan", read_together)
    runs = ["abc", "bcd", "xyz", "a"]
    with ThreadPoolExecutor(4) as threads:
        plans = list(threads.map(lambda names: cache.plan_for(pictures(names)), runs))
    for names, plan in zip(runs, plans, strict=True):
        assert set(names) <= set("".join(plan))
        assert set("".join(cache.pending(names))) == set(names)


def test_a_shard_that_is_finished_while_another_plans_is_not_planned_again(cache, monkeypatch):
    """Receipts are read one after the other, and more of them appear meanwhile."""
    cache.plan_for(pictures("abcdef"))
    cache.finish(0)
    read, finished = progress.read_receipts, iter([1, 2])

    def read_while_others_finish(folder: Path):
        receipts = list(read(folder))
        for number in finished:
            cache.finish(number)
        return receipts

    monkeypatch.setattr(progress, "read_receipts", read_while_others_finish)
    assert cache.plan_for(pictures("abcdef")) == ["ab", "cd", "ef"]


@pytest.fixture
def stamped(monkeypatch):
    """Gives files the stamp `STAMP`, or another one by name."""
    stamp_of = {}
    monkeypatch.setattr(progress, "stamps", lambda paths: {path: stamp_of.get(path.stem, STAMP) for path in paths})
    return stamp_of


def test_the_keys_of_planned_files_are_known_without_reading_them(cache, stamped):
    twice = PlannedImage("c" * 64, 5, ("/c.jpg", "/copy.jpg"), (STAMP, STAMP))
    cache.plan_for([image("b"), image("a"), twice])
    asked = [Path(f"/{name}.jpg") for name in ("a", "copy", "b", "c")]
    index = index_from_plan(cache.plan, asked)
    assert index
    assert index.key_of == {
        Path(f"/{name}.jpg"): key * 64 for name, key in {"a": "a", "copy": "c", "b": "b", "c": "c"}.items()
    }
    in_order = {"b": "b", "a": "a", "c": "copy"}
    assert list(index.path_of.items()) == [(key * 64, Path(f"/{name}.jpg")) for key, name in in_order.items()]
    assert index.unusable == index.former == {}


@pytest.mark.parametrize("planned", [(STAMP,), (None,), ()])
@pytest.mark.parametrize("found", [(1001, 1, 1), (1000, 2, 1), (1000, 1, 2), None])
def test_a_file_that_may_have_changed_is_left_out_and_its_former_key_is_kept(cache, stamped, planned, found):
    copied = PlannedImage("c" * 64, 5, ("/c.jpg", "/copy.jpg"), (planned[0] if planned else None, STAMP))
    cache.plan_for([replace(image("a"), stamps=planned), image("b"), copied])
    stamped |= {"a": found, "c": found}
    index = index_from_plan(cache.plan, [Path(f"/{name}.jpg") for name in ("a", "b", "c", "copy")])
    assert index.key_of == {Path("/b.jpg"): "b" * 64, Path("/copy.jpg"): "c" * 64}
    assert index.path_of == {"b" * 64: Path("/b.jpg"), "c" * 64: Path("/copy.jpg")}
    assert index.former == {"a" * 64: Path("/a.jpg")}
    assert index.stamp_of == {Path("/b.jpg"): STAMP, Path("/copy.jpg"): STAMP}


def test_an_image_that_is_planned_again_from_an_index_of_the_plan_keeps_its_size(cache, site, stamped):
    cache.plan_for(pictures("abcd"))
    for number in range(2):
        cache.finish(number, retry="abcd")
    index = index_from_plan(cache.plan, [Path(f"/{name}.jpg") for name in "abcd"])
    assert index
    again = progress.planned_images(index, site.processor)
    new = new_shards(cache.plan, Finished.of(read_receipts(cache.folder)), again, cache.fingerprint, cache.shard_bytes)
    assert letters(Plan(new)) == ["ab", "cd"]
    assert [image.num_tokens for shard in new for image in shard.images] == [5] * 4


def test_images_are_planned_with_tokens_from_headers_and_all_their_files(site):
    paths = {name: Path(f"/{name}.png") for name in "abcd"}
    index = ImageIndex(
        key_of={paths["a"]: "1", paths["b"]: "2", paths["c"]: "1", paths["d"]: "3"},
        path_of={"2": paths["b"], "1": paths["c"], "3": paths["d"]},
        size_of={"1": (96, 64), "2": None, "3": (10_000, 10)},
        stamp_of={paths["c"]: STAMP},
    )
    assert progress.planned_images(index, site.processor) == [
        PlannedImage("2", 0, ("/b.png",), (None,)),
        PlannedImage("1", 6, ("/a.png", "/c.png"), (None, STAMP)),
        PlannedImage("3", 0, ("/d.png",), (None,)),
    ]


NUM_IMAGES = 8
ME = Process.this("1/4")


def status_of(site, images: ImageIndex) -> StatusReport:
    return status(site.folder(), images.path_of, list(progress.read_receipts(site.folder())))


def interrupt(site, images) -> int:
    """A build that dies; returns the number of stored images."""
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(5))
    return len(site.stored())


def test_bad_images_are_counted_apart_including_those_to_be_retried(site, images):
    (site.path / "text.jpg").write_text("no image")
    more = site.index(*images.key_of, site.path / "text.jpg")
    lost = more.path_of[sorted(images.path_of)[0]]
    content = lost.read_bytes()
    lost.unlink()
    site.build(more)
    report = status_of(site, more)
    assert (report.num_images, report.num_done, report.num_quarantined) == (9, 7, 2)
    lost.write_bytes(content)
    site.build(more)
    report = status_of(site, more)
    assert (report.num_done, report.num_quarantined) == (8, 1)


def test_workers_are_reported_with_their_current_shards(site, images):
    interrupt(site, images)
    with Claims(site.folder(), ME) as mine, Claims(site.folder(), replace(ME, name="2/4", born=0.0)) as dead:
        claim = mine.take("shard-00003", 2)
        claim.update(1)
        claim.beat()
        dead.take("shard-00002", 5)
        report = status_of(site, images)
    [second, first] = report.workers
    assert first == WorkerStatus(
        "1/4", ME.host, ME.job, "shard-00003", "encoding", 1, 2, first.age_s, first.silent_s, True
    )
    assert 0 <= first.age_s < 60 and 0 <= first.silent_s < 60
    assert (second.worker, second.shard, second.phase, second.alive) == ("2/4", "shard-00002", "starting", False)


@pytest.mark.parametrize(
    ("age_s", "num_images", "slow"),
    [(170, 20, False), (190, 20, True), (190, 40, False), (50, 1, False), (61, 1, True)],
)
def test_a_worker_is_slow_after_three_times_the_median_time(site, images, monkeypatch, age_s, num_images, slow):
    interrupt(site, images)
    found = [replace(receipt, seconds=3.0 * len(receipt.images)) for receipt in read_receipts(site.folder())]
    monkeypatch.setattr(progress, "read_receipts", lambda folder: found)
    with Claims(site.folder(), ME) as mine:
        claim = mine.take("shard-00003", num_images)
        claim.work = replace(claim.work, started=time.time() - age_s)
        claim.beat()
        report = status_of(site, images)
    [worker] = report.workers
    assert (worker.slow, worker.state) == (slow, "slow" if slow else "")


@pytest.mark.parametrize(
    ("finished_ago", "worker", "rate"),
    [
        ([10, 40], ME, 20 / 50),  # the first was started 10 s before it was finished
        ([10, 2 * progress.WINDOW_S], ME, 10 / 20),
        ([2 * progress.WINDOW_S], ME, 0.0),
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
    monkeypatch.setattr(progress, "read_receipts", lambda folder: receipts)
    with Claims(site.folder(), worker or ME) as claims:
        if worker:
            claims.take("shard-00003", 1)
        report = status_of(site, images)
    assert report.images_per_second == pytest.approx(rate)
    assert report.eta_s == (pytest.approx(NUM_IMAGES / rate) if rate else None)
