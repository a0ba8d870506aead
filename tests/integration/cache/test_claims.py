"""Claims of other processes: one holds a dead claim, a killed one holds nothing, and heartbeats show progress."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.processes import Preloaded, Process, wait_until

from lookonce.cache.store import claims
from lookonce.cache.store.claims import CLAIMS, Claims, Work
from lookonce.claim_file import Process as Worker
from lookonce.claim_file import age, is_dead, read_process_file

SHARD = "shard-00003"


@pytest.fixture
def start(preloaded: Preloaded, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts a program in a process that is killed in the end; it runs in the test's folder."""
    started: list[Process] = []

    def start(source: str, *arguments: str) -> Process:
        started.append(preloaded.start(source, *arguments, folder=tmp_path, name=f"process{len(started)}"))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


RACER = """
import json, os, sys, time
from pathlib import Path
from lookonce.cache.store.claims import Claims
from lookonce.claim_file import Process, read_process_file
claims = Claims(Path("."), Process.this("racer"))

def meet(place):
    Path(f"{place}-{os.getpid()}").touch()
    while len(list(Path(".").glob(f"{place}-*"))) < int(sys.argv[2]):
        time.sleep(0.005)

meet("ready")
taken = [claim for number in range(int(sys.argv[1])) if (claim := claims.take(f"shard-{number:05d}", 1))]
meet("done")
print(json.dumps([claim.work.shard for claim in taken if claim.is_held()]))
"""
"""A worker that takes all claims it can when every other one is ready, and prints those it holds when all are done."""


def test_of_many_workers_that_take_over_dead_claims_one_holds_each(tmp_path, start):
    num_claims, num_racers = 300, 6
    shards = [f"shard-{number:05d}" for number in range(num_claims)]
    (tmp_path / CLAIMS).mkdir()
    for shard in shards:
        dead = Work(shard, replace(Worker.this(), born=0.0))
        (tmp_path / CLAIMS / f"{shard}.json").write_text(json.dumps(asdict(dead)))
    racers = [start(RACER, str(num_claims), str(num_racers)) for _ in range(num_racers)]
    assert [racer.wait() for racer in racers] == [0] * num_racers
    held_by = {racer.pid: json.loads(racer.out) for racer in racers}
    assert sorted(shard for held in held_by.values() for shard in held) == shards
    assert sum(map(bool, held_by.values())) > 1  # there was a race
    found = {path.stem: read_process_file(path, Work) for path in (tmp_path / CLAIMS).iterdir()}
    holder_of = {shard: pid for pid, held in held_by.items() for shard in held}
    assert {shard: work and work.worker.pid for shard, work in found.items()} == holder_of


ME = Worker.this("1/4")


def test_a_heartbeat_rewrites_the_claim_with_its_progress(tmp_path, claim_file, backdate):
    with Claims(tmp_path, ME, expiry_s=0.45) as mine:  # beats every 0.05 s
        claim = mine.take(SHARD, 5)
        assert claim
        claim.update(4)
        backdate(claim_file, 100)
        wait_until(lambda: age(claim_file) < 1)
        assert (found := read_process_file(claim_file, Work)) and (found.phase, found.num_done) == ("encoding", 4)
        first = claim_file.stat().st_mtime_ns
        wait_until(lambda: claim_file.stat().st_mtime_ns > first)


def test_a_worker_without_progress_sends_no_heartbeat(tmp_path, claim_file, monkeypatch):
    monkeypatch.setattr(claims, "HANG_S", 0.1)
    with Claims(tmp_path, ME, expiry_s=0.45) as mine:  # beats every 0.05 s
        claim = mine.take(SHARD, 5)
        assert claim
        wait_until(lambda: is_dead(claim_file, 0.45))
        claim.update(1)  # progress again
        wait_until(lambda: not is_dead(claim_file, 0.45))


def test_heartbeats_continue_after_one_that_the_disk_refused(tmp_path, claim_file, monkeypatch, backdate):
    refused = []

    def refuse(*_: object) -> int:
        refused.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with Claims(tmp_path, ME, expiry_s=0.45) as mine:
        claim = mine.take(SHARD, 5)
        assert claim
        with monkeypatch.context() as full:
            full.setattr(os, "pwrite", refuse)
            wait_until(lambda: len(refused) > 2)
        backdate(claim_file, 100)
        wait_until(lambda: age(claim_file) < 1)
