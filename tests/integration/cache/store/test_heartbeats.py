"""Heartbeats of a worker: they show its progress, end without progress, and continue after a full disk."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lookonce.cache.store import claims
from lookonce.cache.store.claims import Claims, Work
from lookonce.claim_file import Process, age, is_dead, read_process_file

SHARD = "shard-00003"
ME = Process.this("1/4")


def test_a_heartbeat_rewrites_the_claim_with_its_progress(tmp_path: Path, claim_file: Path, backdate) -> None:
    with Claims(tmp_path, ME, expiry_s=0.45) as mine:  # beats every 0.05 s
        claim = mine.take(SHARD, 5)
        assert claim
        claim.update("encoding", 4)
        backdate(claim_file, 100)
        wait_until(lambda: age(claim_file) < 1)
        assert (found := read_process_file(claim_file, Work)) and (found.phase, found.num_done) == ("encoding", 4)
        first = claim_file.stat().st_mtime_ns
        wait_until(lambda: claim_file.stat().st_mtime_ns > first)


def test_a_worker_without_progress_sends_no_heartbeat(
    tmp_path: Path, claim_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "HANG_S", 0.1)
    with Claims(tmp_path, ME, expiry_s=0.45) as mine:  # beats every 0.05 s
        claim = mine.take(SHARD, 5)
        assert claim
        wait_until(lambda: is_dead(claim_file, 0.45))
        claim.update("encoding", 1)  # progress again
        wait_until(lambda: not is_dead(claim_file, 0.45))


def test_heartbeats_continue_after_one_that_the_disk_refused(
    tmp_path: Path, claim_file: Path, monkeypatch: pytest.MonkeyPatch, backdate
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
        backdate(claim_file, 100)
        wait_until(lambda: age(claim_file) < 1)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
