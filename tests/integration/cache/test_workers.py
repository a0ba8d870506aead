"""Several workers of a cache, killed, stopped, late or overtaken: they build what one worker builds alone."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.processes import Preloaded, Process, wait_until
from support.small_caches import features_in

from lookonce.cache.build import worker as build_module
from lookonce.cache.build.encode import MAX_ON_DEVICE
from lookonce.cache.store.claims import CLAIMS, Claims
from lookonce.cache.store.metadata import Shard, has_receipt, read_plan, read_receipts
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import remove_leftovers
from lookonce.claim_file import Process as ThisProcess
from lookonce.files import TEMPORARY_MARK

NUM_IMAGES = 80
NUM_KILLS = 20


WORKER = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
import torch
from lookonce.cache.build import worker as build
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.datasets.images import index_images
from lookonce.datasets.records import Record

model, root, worker, seconds, log = json.loads(sys.argv[1])
log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

class SlowTower:
    device, dtype, merge_size, tokens_per_tower_batch = torch.device("cpu"), torch.float32, 2, 1

    def encode(self, patches, grids):
        os.write(log, b"." * len(grids))
        time.sleep(seconds)
        return patches.view(-1, 4, 1536)

build.POLL_S = 0.05
fingerprint = Fingerprint(2, "0" * 64, {"out_hidden_size": 1536}, {}, 4, "float32")
images = index_images([Record(tuple(sorted(Path("images").iterdir())), ())])
options = build.BuildOptions(500_000, worker=worker and tuple(worker))
report = build.build_cache(Path(root), fingerprint, ImageProcessor(Path(model)), images, SlowTower, options)
print(json.dumps(asdict(report), default=str))
"""
"""A worker whose features are the patches; it writes a byte for each image to a log. A shard has about five images."""


@dataclass
class Worker:
    """A worker process."""

    process: Process
    log: Path

    @property
    def num_encoded(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def report(self) -> dict[str, Any]:
        assert self.process.wait() == 0, self.process.error
        found: dict[str, Any] = json.loads(self.process.out)
        return found


class Workers:
    """Starts workers; `place` is the folder of all caches."""

    def __init__(self, preloaded: Preloaded, model: Path, place: Path) -> None:
        self.preloaded, self.model, self.place = preloaded, model, place
        self.started: list[Worker] = []
        (place / "images").mkdir()
        rng = np.random.default_rng(0)
        for number in range(NUM_IMAGES):
            pixels = rng.integers(0, 256, (*rng.integers(32, 97, 2), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "images" / f"{number}.png")

    def start(self, root: str, worker: tuple[int, int] | None = None, seconds: float = 0.0) -> Worker:
        name = f"{root}-{len(self.started)}"
        order = json.dumps([str(self.model), root, worker, seconds, name])
        process = self.preloaded.start(WORKER, order, folder=self.place, name=name)
        self.started.append(Worker(process, self.place / name))
        return self.started[-1]

    def folder(self, root: str) -> Path:
        [manifest] = (self.place / root).glob("*/manifest.json")
        return manifest.parent


@pytest.fixture(scope="module")
def workers(preloaded: Preloaded, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    found = Workers(preloaded, sample / "model", tmp_path_factory.mktemp("workers"))
    yield found
    for worker in found.started:
        if worker.process.poll() is None:
            os.kill(worker.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def alone(workers: Workers) -> dict[str, bytes]:
    """The features that one undisturbed worker builds."""
    report = workers.start("alone").report()
    assert (report["num_encoded"], report["num_missing"]) == (NUM_IMAGES, 0)
    return features_in(workers.folder("alone"))


def check(folder: Path, alone: dict[str, bytes]) -> None:
    """The cache is the one that one worker builds: same features, a receipt for each shard, no leftovers."""
    assert features_in(folder) == alone
    plan = read_plan(folder)
    planned = {shard.name: set(shard.keys) for shard in plan.shards}
    assert {receipt.shard: set(receipt.images) for receipt in read_receipts(folder)} == planned
    assert {path.stem for path in (folder / "shards").iterdir()} == planned.keys()
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*"))
    assert not list((folder / CLAIMS).iterdir())
    written = VisionCache.open(folder).index
    assert written.is_current(folder) and len(written) == len(alone)


def largest(shards: tuple[Shard, ...]) -> int:
    return max(len(shard.keys) for shard in shards)


@pytest.mark.guarantee("A killed worker loses its current shard and at most two tower batches of the next one.")
@pytest.mark.guarantee(
    "A cache built by one worker, or by four that are killed twenty times, holds the same features, bit for "
    "bit, and no leftovers."
)
def test_four_workers_killed_twenty_times_build_what_one_builds_alone(workers, alone):
    choice, moment = random.Random(0), random.Random()
    seconds = 0.2  # for an image, so that the cache is not finished before the last kill

    def start(number: int) -> Worker:
        return workers.start("killed", (number, 4), seconds)

    running, killed = [start(number) for number in range(4)], []
    while len(killed) < NUM_KILLS:
        time.sleep(moment.uniform(0.05, 0.25))
        number = choice.randrange(4)
        assert running[number].process.poll() is None, f"the cache was finished after {len(killed)} kills"
        os.kill(running[number].process.pid, signal.SIGKILL)
        running[number].process.wait()  # until the system does not list it any more
        killed.append(running[number])
        running[number] = start(number)
    reports = [worker.report() for worker in running]

    folder = workers.folder("killed")
    check(folder, alone)
    assert [(report["num_missing"], report["num_wanted"]) for report in reports] == [(0, NUM_IMAGES)] * 4
    num_encoded = sum(worker.num_encoded for worker in [*running, *killed])
    shards = read_plan(folder).shards
    assert sum(worker.num_encoded > 0 for worker in killed) > NUM_KILLS / 2  # most kills hit a worker that encodes
    assert NUM_IMAGES < num_encoded  # and some work was lost
    # A kill costs at most the current shard, and the tower batches (here of one image) that the device encodes ahead.
    assert num_encoded <= NUM_IMAGES + NUM_KILLS * (largest(shards) + MAX_ON_DEVICE)


def test_workers_share_the_work_whenever_they_start_and_encode_nothing_twice(workers, alone):
    first = workers.start("late", seconds=0.03)
    wait_until(lambda: first.num_encoded > 20)
    others = [workers.start("late", seconds=0.03) for _ in range(3)]
    everyone = [first, *others]
    reports = [worker.report() for worker in everyone]
    check(workers.folder("late"), alone)
    assert [report["num_encoded"] for report in reports] == [worker.num_encoded for worker in everyone]
    assert sum(worker.num_encoded for worker in everyone) == NUM_IMAGES
    assert all(worker.num_encoded for worker in everyone)
    for report in reports:
        assert report["num_missing"] == 0
        assert report["num_encoded"] + report["num_by_others"] + report["num_reused"] == NUM_IMAGES
    latest = workers.start("late").report()
    assert (latest["num_encoded"], latest["num_reused"]) == (0, NUM_IMAGES)


pytestmark = pytest.mark.usefixtures("no_fsync")

NUM_NOISE = 8
ELSEWHERE = replace(ThisProcess.this(), machine="elsewhere", name="elsewhere")
"""A worker on another machine: only its claim shows whether it is alive."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "POLL_S", 0.02)


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
    [shard, *_] = site.plan_of(images)
    with Claims(site.folder(), ELSEWHERE) as others:
        assert others.take(shard.name, 1)
        report = site.build(images, wait=False)
    assert report.num_missing == len(shard.keys)
    assert report.num_encoded == NUM_NOISE - len(shard.keys)
    assert site.build(images, wait=False).num_missing == 0


def test_a_build_waits_for_others_and_takes_over_when_they_die(site, images):
    [shard, *_] = site.plan_of(images)
    claim = Claims(site.folder(), ELSEWHERE).take(shard.name, 1)  # without a heartbeat
    assert claim
    report = site.build(images, expiry_s=0.3)
    assert (report.num_encoded, report.num_missing) == (NUM_NOISE, 0)
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
    assert 0 < report.num_missing < NUM_NOISE
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
    assert (report.num_encoded, report.num_by_others) == (0, NUM_NOISE)
    assert site.stamps() == before[0]
    assert not site.leftovers()
