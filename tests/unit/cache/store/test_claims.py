"""Claims: a shard belongs to one living worker; dead claims and leftovers are found; and which runs use a cache."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from lookonce.cache.store.claims import (
    SCRATCH_EXPIRY_S,
    SCRATCH_NAME,
    Claims,
    Work,
    claimed_work,
    leftovers,
    note_use,
    scratch_folders,
    sweep,
    uses,
)
from lookonce.cache.store.metadata import Receipt, write_receipt
from lookonce.claim_file import Process, age, read_process_file
from lookonce.files import scratch_folder, writer_host

EXPIRY_S = 60.0
SHARD = "shard-00003"
ME = Process.this("1/4")


def test_a_released_claim_can_be_taken_again(tmp_path, claim_file):
    with Claims(tmp_path, ME) as mine:
        claim = mine.take(SHARD, 1)
        assert claim
        mine.release(claim)
        assert not claim_file.exists()
        assert mine.take(SHARD, 1)
    assert not claim_file.exists()  # leaving the context releases all claims


def test_a_claim_names_worker_shard_and_progress(take, claim_file, monkeypatch):
    for name, value in {"ARRAY_JOB_ID": "77", "ARRAY_TASK_ID": "4", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    claim = take(Process.this("4/16"))
    assert claim
    claim.update(3)
    claim.beat()
    found = read_process_file(claim_file, Work)
    assert found == claim.work
    assert (found.shard, found.phase, found.num_done, found.num_images) == (SHARD, "encoding", 3, 5)
    assert (found.worker.name, found.worker.job, found.worker.pid) == ("4/16", "77_4 (restart 1)", os.getpid())
    assert abs(found.started - time.time()) < 60


def test_a_worker_whose_claim_was_taken_over_notices_and_leaves_the_others_alone(take, claim_file, backdate):
    asleep = take()
    backdate(claim_file, EXPIRY_S + 1)
    other = take(replace(ME, name="other"))
    assert asleep and other and not asleep.is_held()
    asleep.update(4)
    asleep.beat()
    os.utime(claim_file, (1, 1))
    asleep.beat()
    assert claim_file.stat().st_mtime == 1  # it touches its own file, not the other's
    asleep.release()
    assert other.is_held() and read_process_file(claim_file, Work) == other.work
    other.release()
    assert not claim_file.exists()


def test_a_living_claim_with_the_inode_of_a_dead_one_is_not_removed(tmp_path, take, claim_file, monkeypatch):
    """Between a worker's check of a dead claim and its removal, another may take over, with the same inode."""
    claim_file.parent.mkdir()
    claim_file.write_text(json.dumps(asdict(Work(SHARD, replace(ME, born=0.0)))))
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


@pytest.mark.parametrize("content", ["", "[]", '{"shard": "a", "worker": 7}'])
def test_an_unreadable_claim_counts_until_it_expires(tmp_path, take, claim_file, content, backdate):
    claim_file.parent.mkdir()
    claim_file.write_text(content)
    assert read_process_file(claim_file, Work) is None
    assert take() is None
    [(work, _, alive)] = claimed_work(tmp_path, EXPIRY_S)
    assert (work.shard, work.worker.name, alive) == (SHARD, "unknown", True)
    backdate(claim_file, EXPIRY_S + 1)
    assert take()


def test_a_claim_that_could_not_be_written_does_not_exist(take, claim_file, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        with pytest.raises(OSError, match="No space"):
            take()
    assert not list(claim_file.parent.iterdir())
    assert take()
    assert list(claim_file.parent.iterdir()) == [claim_file]


def test_a_claim_always_names_its_holder(take, claim_file, monkeypatch):
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


def test_a_reused_process_id_does_not_keep_a_claim_alive(take):
    before = take(replace(ME, born=ME.born - 60))
    after = take()
    assert before and after
    assert (before.is_held(), after.is_held()) == (False, True)


def test_an_ended_process_that_the_system_still_lists_does_not_keep_a_claim_alive(take):
    with subprocess.Popen(["true"]) as process:
        child = psutil.Process(process.pid)
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.005)
        assert take(replace(ME, pid=child.pid, born=child.create_time() - psutil.boot_time()))
        assert take()


def test_setting_the_clock_of_a_machine_does_not_kill_its_workers(monkeypatch):
    worker, boot_time = Process.this(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot_time + 3600)
    assert psutil.boot_time() == boot_time + 3600
    assert not worker.is_gone()


@pytest.mark.parametrize(("silent_s", "is_taken"), [(-1000, False), (EXPIRY_S - 5, False), (EXPIRY_S + 1, True)])
def test_a_claim_without_a_heartbeat_expires(take, claim_file, silent_s, is_taken, backdate):
    held = take()
    backdate(claim_file, silent_s)
    assert bool(take()) == is_taken
    assert held and held.is_held() != is_taken


@pytest.mark.parametrize("error", [None, errno.EROFS])
def test_age_leaves_no_file_and_in_a_read_only_folder_is_by_the_clock_of_this_machine(
    tmp_path, monkeypatch, error, backdate
):
    file = tmp_path / "file"
    file.touch()
    backdate(file, 100)

    def refuse(*_, **__):
        raise OSError(error, os.strerror(error))

    if error:
        monkeypatch.setattr(Path, "touch", refuse)
    assert 100 <= age(file) < 105
    assert list(tmp_path.iterdir()) == [file]


HERE, HOST = os.getpid(), writer_host()


@pytest.fixture(scope="module")
def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("shards", "receipts", "claims"):
        (tmp_path / name).mkdir()
    return tmp_path


def of_kind(kind: str, folder: Path) -> list[Path]:
    return [path for path, found in leftovers(folder, EXPIRY_S) if found == kind]


def write(path: Path, age_s: float = 0) -> Path:
    path.write_text("content")
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return path


@pytest.mark.parametrize("subfolder", ["", "shards"])
@pytest.mark.parametrize(
    ("writer", "age_s", "is_leftover"),
    [
        ("HOST-GONE-0a1b2c3d", 0, True),
        ("HOST-HERE-0a1b2c3d", 0, False),
        ("HOST-HERE-0a1b2c3d", EXPIRY_S + 5, True),
        ("elsewhere-GONE-0a1b2c3d", 0, False),
        ("elsewhere-GONE-0a1b2c3d", EXPIRY_S - 5, False),
        ("elsewhere-GONE-0a1b2c3d", EXPIRY_S + 5, True),
        ("node-7-HOST-GONE-0a1b2c3d", 0, False),
        ("", 0, False),
        ("nonsense", 0, False),
        ("nonsense", EXPIRY_S + 5, True),
    ],
)
def test_a_temporary_file_is_a_leftover_if_its_writer_is_dead(folder, gone, subfolder, writer, age_s, is_leftover):
    names = writer.replace("HOST", HOST).replace("GONE", str(gone)).replace("HERE", str(HERE))
    path = write(folder / subfolder / f"shard-00000.safetensors.tmp-{names}", age_s)
    assert of_kind("temporary file", folder) == ([path] if is_leftover else [])
    sweep(folder, EXPIRY_S)
    assert path.exists() != is_leftover


def test_temporary_files_of_a_claimed_shard_are_kept(folder, take):
    held = take(ME, "shard-00001")
    mine, stale = (
        write(folder / "shards" / f"{shard}.safetensors.tmp-elsewhere-1-0a1b2c3d", EXPIRY_S + 5)
        for shard in ("shard-00001", "shard-00002")
    )
    assert of_kind("temporary file", folder) == [stale]
    held.release()
    assert of_kind("temporary file", folder) == [mine, stale]


def test_shards_without_a_receipt_are_listed_unless_claimed_and_are_not_removed(folder, take):
    paths = [write(folder / "shards" / f"shard-0000{number}.safetensors") for number in range(4)]
    write_receipt(folder, Receipt("shard-00000", "", 0, 0, "", "", 0.0, 0.0, {}))
    assert take(ME, "shard-00001") and take(replace(ME, born=0.0), "shard-00002")
    assert of_kind("unfinished shard", folder) == paths[2:]
    sweep(folder, EXPIRY_S)
    assert all(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("name", "age_s", "is_leftover"),
    [
        ("lookonce-bench.tmp-HOST-GONE-0a1b2c3_", 0, True),
        ("lookonce-bench.tmp-HOST-HERE-0a1b2c3_", SCRATCH_EXPIRY_S - 5, False),
        ("lookonce-bench.tmp-HOST-HERE-0a1b2c3_", SCRATCH_EXPIRY_S + 5, True),
        ("lookonce-bench.tmp-elsewhere-GONE-0a1b2c3_", SCRATCH_EXPIRY_S - 5, False),
        ("lookonce-bench.tmp-elsewhere-GONE-0a1b2c3_", SCRATCH_EXPIRY_S + 5, True),
        ("lookonce-bench.tmp-elsewhere", SCRATCH_EXPIRY_S + 5, False),
        ("lookonce-bench-results", SCRATCH_EXPIRY_S + 5, False),
        ("results.tmp-HOST-GONE-0a1b2c3_", 0, False),
    ],
)
def test_a_scratch_folder_is_a_leftover_if_its_process_is_dead(tmp_path, gone, name, age_s, is_leftover):
    path = tmp_path / name.replace("HOST", HOST).replace("GONE", str(gone)).replace("HERE", str(HERE))
    (path / "shards").mkdir(parents=True)
    files = [write(path / "shards" / "old", 2 * SCRATCH_EXPIRY_S), write(path / "shards" / "new", age_s)]
    for each in (path / "shards", path):
        os.utime(each, (1, 1))
    with scratch_folder(tmp_path, "pilot") as living:
        assert SCRATCH_NAME.fullmatch(living.name)
        for _ in range(2):  # listing changes no times
            assert list(scratch_folders(tmp_path)) == ([path] if is_leftover else [])
    assert all(file.exists() for file in files)


def test_a_file_or_link_with_the_name_of_a_scratch_folder_is_not_one(tmp_path, gone):
    (tmp_path / "mine").mkdir()
    (tmp_path / f"lookonce-bench.tmp-{HOST}-{gone}-0a1b2c3_").symlink_to(tmp_path / "mine")
    write(tmp_path / f"lookonce-pilot.tmp-{HOST}-{gone}-0a1b2c3_")
    assert list(scratch_folders(tmp_path)) == []


def test_a_build_removes_what_dead_processes_left(site, images, gone):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(5))
    folder = site.folder()
    writer = f"tmp-{HOST}-{gone}-0a1b2c3d"
    for name in ("shards/shard-00002.safetensors", "receipts/shard-00002.json", "plan-00001.json", "index.safetensors"):
        write(folder / f"{name}.{writer}")
    assert Claims(folder, replace(ME, born=0.0)).take("shard-00001", 1)
    write(folder / "shards" / "shard-00002.safetensors")  # renamed, and then the power went
    assert site.build(images).num_missing == 0
    assert not site.leftovers()


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return folder


def test_a_use_is_noted_once_with_the_absolute_run_folder(tmp_path, run, monkeypatch):
    cache = tmp_path / "cache"
    note_use(cache, run)
    monkeypatch.chdir(run.parent)
    note_use(cache, run.relative_to(run.parent))
    [use] = uses(cache)
    assert (use.run, use.host) == (str(run), os.uname().nodename) and use.time > 1.7e9
    [path] = (cache / "uses").iterdir()
    assert len(path.stem) == 16
    assert json.loads(path.read_text()).keys() == {"run", "host", "time"}


def test_a_use_ends_when_the_run_folder_is_removed_or_empty(tmp_path, run):
    assert uses(tmp_path / "cache") == []
    other = run.with_name("b")
    shutil.copytree(run, other)
    for folder in (run, other):
        note_use(tmp_path / "cache", folder)
    assert [use.run for use in uses(tmp_path / "cache")] == [str(run), str(other)]
    shutil.rmtree(run)
    (other / "run.json").unlink()
    assert uses(tmp_path / "cache") == []


def test_a_broken_note_is_not_a_use_and_a_read_only_cache_is_no_error(tmp_path, run):
    (tmp_path / "uses").mkdir()
    for content in ("", "[]", '{"run": 3, "host": "", "time": 0}'):
        (tmp_path / "uses" / "0123456789abcdef.json").write_text(content)
        assert uses(tmp_path) == []
    (tmp_path / "file").write_text("")
    note_use(tmp_path / "file", run)  # as on a read-only disk, also for root
    assert uses(tmp_path / "file") == []
