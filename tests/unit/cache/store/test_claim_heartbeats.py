"""Dead claims: of an ended process at once, of a silent one after a while by the clock of the disk."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lookonce.claim_file import Process, age

EXPIRY_S = 60.0
SHARD = "shard-00003"
ME = Process.this("1/4")


# Processes.


def test_a_reused_process_id_does_not_keep_a_claim_alive(take) -> None:
    before = take(replace(ME, born=ME.born - 60))
    after = take()
    assert before and after
    assert (before.is_held(), after.is_held()) == (False, True)


def test_processes_of_other_machines_are_not_looked_up_here(take) -> None:
    unused = 2**22 + 1  # above the highest process id of Linux
    assert take(replace(ME, machine="another", pid=unused))
    assert take() is None


def test_setting_the_clock_of_a_machine_does_not_kill_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, boot_time = Process.this(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
    assert psutil.boot_time() == boot_time + 3600
    assert not worker.is_gone()


# Ages are by the clock of the disk.


@pytest.mark.parametrize(("silent_s", "is_taken"), [(-1000, False), (EXPIRY_S - 5, False), (EXPIRY_S + 1, True)])
def test_a_claim_without_a_heartbeat_expires(take, claim_file: Path, silent_s: float, is_taken: bool, backdate) -> None:
    held = take()
    backdate(claim_file, silent_s)
    assert bool(take()) == is_taken
    assert held and held.is_held() != is_taken


def test_the_clock_of_this_machine_does_not_matter(
    take, claim_file: Path, monkeypatch: pytest.MonkeyPatch, backdate
) -> None:
    held = take()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10 * EXPIRY_S)
    assert held and take() is None and age(claim_file) < 5
    backdate(claim_file, EXPIRY_S + 1)
    monkeypatch.setattr(time, "time", lambda: now - 10 * EXPIRY_S)
    assert take()


def test_age_is_by_the_clock_of_the_disk_and_leaves_no_file(tmp_path: Path, backdate) -> None:
    file = tmp_path / "file"
    file.touch()
    backdate(file, 100)
    assert 100 <= age(file) < 105
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_in_a_read_only_folder_age_is_by_the_clock_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, backdate
) -> None:
    file = tmp_path / "file"
    file.touch()
    backdate(file, 100)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "touch", refuse)
    assert 100 <= age(file) < 105
