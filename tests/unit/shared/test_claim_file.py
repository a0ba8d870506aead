"""Claim files of folders: one living process holds each, others learn who, and a lost one is noticed."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.claim_file import FolderClaim, Process, holder, is_living
from lookonce.files import write_json

EXPIRY_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "claim.json"


def write(path: Path, process: Process) -> None:
    write_json(path, {"worker": process.__dict__, "command": "lookonce train", "started": 0.0})


def test_a_folder_is_held_until_the_end_of_the_context(path):
    with FolderClaim(path, "lookonce train", EXPIRY_S) as claim:
        assert not path.exists()
        assert claim.take() == "" and is_living(path, EXPIRY_S)
        used_by = FolderClaim(path, "lookonce eval", EXPIRY_S).take()
        assert re.match(rf"`lookonce train`: process {os.getpid()} on \S+, since \d{{4}}-", used_by)
        assert not claim.is_lost()
    assert list(path.parent.iterdir()) == []


def test_another_machine_is_named_with_the_age_of_its_heartbeat(path, backdate):
    write(path, replace(Process.this(), machine="elsewhere", host="node7", pid=4711, job="12 (restart 1)"))
    backdate(path, 20)
    with FolderClaim(path, "lookonce train", EXPIRY_S) as claim:
        used_by = claim.take()
        assert "process 4711 on node7, job 12 (restart 1), since 1970-01-01" in used_by
        assert "last sign of life 20 s ago; if it was killed, others may take over after 60 s" in used_by
        backdate(path, 41)
        assert claim.take() == ""


def test_a_dead_claim_of_a_machine_whose_clock_is_ahead_ends_after_its_expiry(path, backdate):
    write(path, replace(Process.this(), machine="elsewhere", host="node7"))
    backdate(path, -7200)
    claim = FolderClaim(path, "lookonce train", EXPIRY_S)
    assert "last sign of life 0 s ago; if it was killed, others may take over after 60 s" in claim.take()
    assert time.time() - 5 < path.stat().st_mtime < time.time() + 5  # it is counted from now on
    backdate(path, EXPIRY_S + 1)
    with claim:
        assert claim.take() == ""


def test_a_living_claim_of_a_machine_whose_clock_is_ahead_stays(path, backdate):
    for _ in range(3):  # heartbeats
        write(path, replace(Process.this(), machine="elsewhere", host="node7"))
        backdate(path, -7200)
        assert is_living(path, EXPIRY_S)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"worker": 3}'])
def test_an_unreadable_claim_counts_until_it_expires(path, backdate, content):
    path.parent.mkdir()
    path.write_text(content)
    with FolderClaim(path, "lookonce train", EXPIRY_S) as claim:
        assert claim.take() == "a process whose claim file cannot be read"
        backdate(path, EXPIRY_S + 1)
        assert claim.take() == ""


@pytest.mark.parametrize(
    ("theirs", "mine", "is_gone"),
    [
        (("7", None), ("7", "1"), True),
        (("7", "1"), ("7", "2"), True),
        (("7", "1"), ("7", "1"), False),
        (("7", "2"), ("7", "1"), False),
        (("7", None), ("8", "1"), False),
        (("7", None), (None, None), False),
        ((None, None), ("7", "1"), False),
    ],
)
def test_an_earlier_start_of_the_same_slurm_job_has_ended(monkeypatch, theirs, mine, is_gone):
    def this(job: str | None, restarts: str | None) -> Process:
        for name, value in {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": restarts}.items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        return Process.this()

    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    there = replace(this(*theirs), machine="elsewhere")
    this(*mine)
    assert there.is_gone() == is_gone


def test_a_claim_that_another_process_took_over_is_lost(path, backdate):
    with FolderClaim(path, "lookonce train", EXPIRY_S) as asleep, FolderClaim(path, "lookonce eval", EXPIRY_S) as other:
        asleep.take()
        backdate(path, EXPIRY_S + 1)
        assert other.take() == "" and asleep.is_lost() and not other.is_lost()
        assert "lookonce eval" in holder(path, EXPIRY_S)
    assert not path.exists()


def test_a_claim_on_a_filesystem_where_links_have_inodes_of_their_own_is_not_lost(path):
    with FolderClaim(path, "lookonce train", EXPIRY_S) as claim:
        assert not claim.is_lost()  # it was not taken
        claim.take()
        content = path.read_bytes()
        path.rename(path.with_name("kept"))  # the inode stays in use
        path.write_bytes(content)
        assert not claim.is_lost()
        path.unlink()
        assert claim.is_lost()
