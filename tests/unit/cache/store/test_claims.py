"""Claims: a shard belongs to one living worker; a worker that lost its claim notices and disturbs no other."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lookonce.cache.store.claims import Claims, Work, claimed_work
from lookonce.claim_file import Process, read_process_file

EXPIRY_S = 60.0
SHARD = "shard-00003"
ME = Process.this("1/4")


# Taking a claim.


def test_exactly_one_of_many_workers_gets_a_shard(tmp_path: Path) -> None:
    shards, barrier = [f"shard-{number:05d}" for number in range(40)], threading.Barrier(8)

    def work(number):
        mine = Claims(tmp_path, ME)
        barrier.wait()
        return [claim for shard in shards if (claim := mine.take(shard, 1))]

    with ThreadPoolExecutor(8) as threads:
        taken = [claim for found in threads.map(work, range(8)) for claim in found]
    assert sorted(claim.work.shard for claim in taken) == shards
    assert all(claim.is_held() for claim in taken)
    for claim in taken:
        claim.release()


def test_a_living_claim_is_not_taken(take) -> None:
    held = take()
    assert held and take() is None and take(replace(ME, name="another")) is None
    assert held.is_held()


def test_a_released_claim_can_be_taken_again(tmp_path: Path, claim_file: Path) -> None:
    with Claims(tmp_path, ME) as mine:
        claim = mine.take(SHARD, 1)
        assert claim
        mine.release(claim)
        assert not claim_file.exists()
        assert mine.take(SHARD, 1)
    assert not claim_file.exists()  # leaving the context releases all claims


def test_a_claim_names_worker_shard_and_progress(take, claim_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ARRAY_JOB_ID": "77", "ARRAY_TASK_ID": "4", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    claim = take(Process.this("4/16"))
    assert claim
    claim.update("encoding", 3)
    claim.beat()
    found = read_process_file(claim_file, Work)
    assert found == claim.work
    assert (found.shard, found.phase, found.num_done, found.num_images) == (SHARD, "encoding", 3, 5)
    assert (found.worker.name, found.worker.job, found.worker.pid) == ("4/16", "77_4 (restart 1)", os.getpid())
    assert abs(found.started - time.time()) < 60


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "9"}, "9"),
        ({"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "2"}, "9 (restart 2)"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "0"}, "8_0"),
    ],
)
def test_a_worker_knows_its_slurm_job(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Process.this().job == expected


# Losing a claim.


def test_a_worker_whose_claim_was_taken_over_notices_and_leaves_the_others_alone(
    take, claim_file: Path, backdate
) -> None:
    asleep = take()
    backdate(claim_file, EXPIRY_S + 1)
    other = take(replace(ME, name="other"))
    assert asleep and other and not asleep.is_held()
    asleep.update("encoding", 4)
    asleep.beat()
    os.utime(claim_file, (1, 1))
    asleep.beat()
    assert claim_file.stat().st_mtime == 1  # it touches its own file, not the other's
    asleep.release()
    assert other.is_held() and read_process_file(claim_file, Work) == other.work
    other.release()
    assert not claim_file.exists()


def test_a_claim_that_was_removed_is_lost_and_can_be_released(take, claim_file: Path) -> None:
    claim = take()
    claim_file.unlink()
    assert claim and not claim.is_held()
    claim.release()


def write_dead(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(Work(path.stem, replace(ME, born=0.0)))))


def test_a_living_claim_is_not_removed_even_if_it_reuses_the_inode_of_the_dead_one(
    tmp_path: Path, take, claim_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a worker's check of a dead claim and its removal, another may take over, with the same inode."""
    write_dead(claim_file)
    inode, living = claim_file.stat().st_ino, []

    def check_slowly(path: Path, expiry_s: float) -> bool:
        for number in range(100):
            path.unlink()
            claim = take(replace(ME, name="faster"))
            living.append(claim)
            if path.stat().st_ino == inode:
                return True
            claim.release()
            (tmp_path / f"spare-{number}").touch()
            path.touch()
        pytest.skip("this filesystem does not reuse inodes")

    with monkeypatch.context() as slow:
        slow.setattr("lookonce.claim_file.is_dead", check_slowly)
        assert Claims(tmp_path, ME).take(SHARD, 5) is None
    assert living[-1].is_held()


def test_a_dead_claim_that_another_worker_removes_first_is_taken_over(
    take, claim_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dead(claim_file)

    def rename(old: Path, new: Path) -> None:
        old.unlink()

    monkeypatch.setattr(os, "rename", rename)
    assert take()


# Unreadable claims.


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"shard": "a"}', '{"shard": "a", "worker": 7}', "\0" * 9])
def test_an_unreadable_claim_counts_until_it_expires(
    tmp_path: Path, take, claim_file: Path, content: str, backdate
) -> None:
    claim_file.parent.mkdir()
    claim_file.write_text(content)
    assert read_process_file(claim_file, Work) is None
    assert take() is None
    [(work, _, alive)] = claimed_work(tmp_path, EXPIRY_S)
    assert (work.shard, work.worker.name, alive) == (SHARD, "unknown", True)
    backdate(claim_file, EXPIRY_S + 1)
    assert take()


def test_a_claim_that_could_not_be_written_does_not_exist(
    take, claim_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="No space"):
            take()
    assert not list(claim_file.parent.iterdir())
    assert take()
    assert list(claim_file.parent.iterdir()) == [claim_file]


def test_a_claim_always_names_its_holder(take, claim_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So other workers know at once that a claim is dead, whenever its holder was killed."""
    seen = []
    for name in ("open", "pwrite", "fsync", "link"):
        real = getattr(os, name)

        def look(*args, real=real, **options):
            seen.append(claim_file.exists() and read_process_file(claim_file, Work) is None)
            result = real(*args, **options)
            seen.append(claim_file.exists() and read_process_file(claim_file, Work) is None)
            return result

        monkeypatch.setattr(os, name, look)
    assert take()
    monkeypatch.undo()
    assert len(seen) >= 8 and not any(seen)


def test_all_claims_are_listed_with_whether_they_are_alive(tmp_path: Path, take, backdate) -> None:
    take(replace(ME, name="silent"), "shard-00002")
    backdate(tmp_path / "claims" / "shard-00002.json", EXPIRY_S + 1)
    take(replace(ME, name="dead", born=0.0), "shard-00001")
    take(ME, "shard-00000")
    found = list(claimed_work(tmp_path, EXPIRY_S))
    assert [(work.shard, work.worker.name, alive) for work, _, alive in found] == [
        ("shard-00000", "1/4", True),
        ("shard-00001", "dead", False),
        ("shard-00002", "silent", False),
    ]
    assert [silent_s > EXPIRY_S for _, silent_s, _ in found] == [False, False, True]
    assert list(claimed_work(tmp_path / "nowhere")) == []
    assert len(list((tmp_path / "claims").iterdir())) == 3
