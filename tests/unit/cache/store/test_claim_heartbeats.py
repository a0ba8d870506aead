"""Who is dead: a process that has ended, at once; one that is silent, after a while by the clock of the disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lookonce.cache.store import claims
from lookonce.cache.store.claims import Claims, Worker, age, is_dead, read_work

EXPIRY_S = 60.0
SHARD = "shard-00003"
ME = Worker.this_process("1/4")


# Processes.

CHILD = """
import sys, time
from pathlib import Path
from lookonce.cache.store.claims import Claims, Worker
claims = Claims(Path(sys.argv[1]), Worker.this_process("child"))
print(all([claims.take(shard, 1) for shard in sys.argv[2:]]), flush=True)
time.sleep(600)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the claim of `SHARD`."""
    command = [sys.executable, "-c", CHILD, str(tmp_path), SHARD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "True\n"
        yield process
        process.kill()


@pytest.mark.parametrize("reaped", [False, True])
def test_the_claim_of_a_killed_process_is_taken_at_once(
    take, child: subprocess.Popen[str], claim_file: Path, reaped: bool
) -> None:
    assert take() is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still listed
    if reaped:
        child.wait()
    claim = take()
    assert claim and claim.is_held()
    assert read_work(claim_file) == claim.work


def test_a_stopped_process_keeps_its_claim_until_it_expires(
    take, child: subprocess.Popen[str], claim_file: Path, put_back
) -> None:
    child.send_signal(signal.SIGSTOP)
    assert take() is None
    put_back(claim_file, EXPIRY_S + 1)
    assert take()


def test_a_number_that_another_process_has_got_is_not_the_one_that_claimed(take) -> None:
    before = take(replace(ME, born=ME.born - 60))
    after = take()
    assert before and after
    assert (before.is_held(), after.is_held()) == (False, True)


def test_a_process_of_another_machine_is_not_looked_for_here(take) -> None:
    nobody = 2**22 + 1  # above the highest number that Linux gives
    assert take(replace(ME, machine="another", pid=nobody))
    assert take() is None


def test_a_worker_lives_on_when_the_clock_of_its_machine_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, boot_time = Worker.this_process(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
    assert psutil.boot_time() == boot_time + 3600
    assert not worker.is_gone()


# Time is that of the disk.


@pytest.mark.parametrize(("silent_s", "is_taken"), [(-1000, False), (EXPIRY_S - 5, False), (EXPIRY_S + 1, True)])
def test_a_claim_expires_when_it_was_silent_for_long(
    take, claim_file: Path, silent_s: float, is_taken: bool, put_back
) -> None:
    held = take()
    put_back(claim_file, silent_s)
    assert bool(take()) == is_taken
    assert held and held.is_held() != is_taken


def test_the_clock_of_this_machine_does_not_matter(
    take, claim_file: Path, monkeypatch: pytest.MonkeyPatch, put_back
) -> None:
    held = take()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * EXPIRY_S)
    assert held and take() is None and age(claim_file) < 5
    put_back(claim_file, EXPIRY_S + 1)
    monkeypatch.setattr(time, "time", lambda: now - 10 * EXPIRY_S)
    assert take()


def test_age_is_told_in_the_seconds_of_the_disk_and_leaves_nothing(tmp_path: Path, put_back) -> None:
    file = tmp_path / "file"
    file.touch()
    put_back(file, 100)
    assert 100 <= age(file) < 105
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_in_a_folder_that_may_only_be_read_age_is_told_by_this_machines_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, put_back
) -> None:
    file = tmp_path / "file"
    file.touch()
    put_back(file, 100)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "touch", refuse)
    assert 100 <= age(file) < 105


def test_a_heart_that_beats_touches_the_file_and_says_how_far_it_is(tmp_path: Path, claim_file: Path, put_back) -> None:
    with Claims(tmp_path, ME, expiry_s=0.45) as mine:  # beats every 0.05 s
        claim = mine.take(SHARD, 5)
        assert claim
        claim.update("encoding", 4)
        put_back(claim_file, 100)
        wait_until(lambda: age(claim_file) < 1)
        assert (found := read_work(claim_file)) and (found.phase, found.num_done) == ("encoding", 4)
        first = claim_file.stat().st_mtime_ns
        wait_until(lambda: claim_file.stat().st_mtime_ns > first)


def test_a_worker_that_gets_nowhere_is_heard_no_more(
    tmp_path: Path, claim_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "STANDSTILL_S", 0.2)
    with Claims(tmp_path, ME, expiry_s=0.9) as mine:  # beats every 0.1 s
        claim = mine.take(SHARD, 5)
        assert claim
        wait_until(lambda: is_dead(claim_file, 0.9))
        claim.update("encoding", 1)  # on it goes
        wait_until(lambda: not is_dead(claim_file, 0.9))


def test_a_beat_that_the_disk_refuses_is_not_the_last(
    tmp_path: Path, claim_file: Path, monkeypatch: pytest.MonkeyPatch, put_back
) -> None:
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
        put_back(claim_file, 100)
        wait_until(lambda: age(claim_file) < 1)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
