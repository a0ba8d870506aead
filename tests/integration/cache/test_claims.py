"""Claims of other processes: of many that want a dead claim one holds it, and a killed one holds nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from support.processes import Preloaded, Process

from lookonce.cache.store.claims import CLAIMS, Work
from lookonce.claim_file import Process as Worker
from lookonce.claim_file import read_process_file

EXPIRY_S = 60.0
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


def test_of_many_workers_that_take_over_dead_claims_one_holds_each(tmp_path: Path, start) -> None:
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


HOLDER = """
import sys, time
from pathlib import Path
from lookonce.cache.store.claims import Claims
from lookonce.claim_file import Process, read_process_file
claims = Claims(Path("."), Process.this("child"))
assert claims.take(sys.argv[1], 1)
Path("holds").touch()
time.sleep(600)
"""


@pytest.fixture
def holder(start: Callable[..., Process], tmp_path: Path) -> Process:
    """Another process that holds the claim of `SHARD`."""
    process = start(HOLDER, SHARD)
    process.wait_until((tmp_path / "holds").exists)
    return process


@pytest.mark.parametrize("reaped", [False, True])
def test_the_claim_of_a_killed_process_is_taken_at_once(take, holder: Process, claim_file: Path, reaped: bool) -> None:
    assert take() is None
    os.kill(holder.pid, signal.SIGKILL)
    while psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE:  # dead, and still listed
        time.sleep(0.005)
    if reaped:
        holder.wait()
    claim = take()
    assert claim and claim.is_held()
    assert read_process_file(claim_file, Work) == claim.work


def test_a_stopped_process_keeps_its_claim_until_it_expires(take, holder: Process, claim_file: Path, backdate) -> None:
    os.kill(holder.pid, signal.SIGSTOP)
    assert take() is None
    backdate(claim_file, EXPIRY_S + 1)
    assert take()
