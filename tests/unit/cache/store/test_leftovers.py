"""Leftovers of dead processes are found and removed, files of living ones are not; and which runs use a cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.store import claims
from lookonce.cache.store.claims import (
    SCRATCH_EXPIRY_S,
    Claim,
    Claims,
    leftovers,
    note_use,
    scratch_folders,
    sweep,
    use_path,
    uses,
)
from lookonce.cache.store.metadata import Receipt, write_receipt
from lookonce.claim_file import Process
from lookonce.files import scratch_folder, writer_host

EXPIRY_S = 60.0
ME = Process.this()
DEAD = replace(ME, born=0.0)
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


def claim(folder: Path, shard: str, worker: Process) -> Claim:
    found = Claims(folder, worker, EXPIRY_S).take(shard, 1)
    assert found
    return found


def of_kind(kind: str, folder: Path) -> list[Path]:
    return [path for path, found in leftovers(folder, EXPIRY_S) if found == kind]


def write(path: Path, age_s: float = 0) -> Path:
    path.write_text("content")
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return path


@pytest.mark.parametrize("subfolder", ["", "shards", "receipts", "claims"])
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


def test_temporary_files_of_a_claimed_shard_are_kept(folder, gone):
    held = claim(folder, "shard-00001", ME)
    mine, stale = (
        write(folder / "shards" / f"{shard}.safetensors.tmp-elsewhere-1-0a1b2c3d", EXPIRY_S + 5)
        for shard in ("shard-00001", "shard-00002")
    )
    assert of_kind("temporary file", folder) == [stale]
    held.release()
    assert of_kind("temporary file", folder) == [mine, stale]


def test_a_folder_is_not_a_temporary_file(folder, gone):
    (folder / f"lookonce-bench.tmp-{HOST}-{gone}-0a1b2c3d").mkdir()
    assert of_kind("temporary file", folder) == []


def test_dead_claims_are_removed_and_living_ones_are_not(folder):
    living, dead, silent = (
        claim(folder, f"shard-0000{number}", worker) for number, worker in enumerate((ME, DEAD, ME))
    )
    paths = [folder / "claims" / f"shard-0000{number}.json" for number in range(3)]
    os.utime(paths[2], (1, 1))
    assert of_kind("dead claim", folder) == paths[1:]
    sweep(folder, EXPIRY_S)
    assert list((folder / "claims").iterdir()) == paths[:1]
    for each in (living, dead, silent):
        each.release()


def test_a_dead_claim_that_was_taken_over_meanwhile_is_not_removed(folder, monkeypatch):
    living = claim(folder, "shard-00000", ME)
    monkeypatch.setattr(claims, "leftovers", lambda *_: [(folder / "claims" / "shard-00000.json", "dead claim")])
    sweep(folder, EXPIRY_S)
    assert living.is_held()
    living.release()


def test_shards_without_a_receipt_are_listed_unless_claimed_and_are_not_removed(folder):
    paths = [write(folder / "shards" / f"shard-0000{number}.safetensors") for number in range(4)]
    write_receipt(folder, Receipt("shard-00000", "", 0, 0, "", "", 0.0, 0.0, {}))
    living, dead = claim(folder, "shard-00001", ME), claim(folder, "shard-00002", DEAD)
    assert of_kind("unfinished shard", folder) == paths[2:]
    sweep(folder, EXPIRY_S)
    assert all(path.exists() for path in paths)
    living.release()
    dead.release()


CHILD = """
import os, signal, sys
from pathlib import Path
from lookonce.files import scratch_folder
with scratch_folder(Path(sys.argv[1]), "bench") as folder:
    (folder / "features").write_text("content")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_scratch_folder_of_a_killed_process_is_a_leftover_and_that_of_a_living_one_is_not(tmp_path):
    subprocess.run([sys.executable, "-c", CHILD, tmp_path])
    [left] = tmp_path.iterdir()
    with scratch_folder(tmp_path, "pilot"):
        assert list(scratch_folders(tmp_path)) == [left]
    sweep(tmp_path, EXPIRY_S)
    assert left.exists()


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
    for _ in range(2):  # listing changes no times
        assert list(scratch_folders(tmp_path)) == ([path] if is_leftover else [])
    assert all(file.exists() for file in files)


def test_a_file_or_link_with_the_name_of_a_scratch_folder_is_not_one(tmp_path, gone):
    (tmp_path / "mine").mkdir()
    (tmp_path / f"lookonce-bench.tmp-{HOST}-{gone}-0a1b2c3_").symlink_to(tmp_path / "mine")
    write(tmp_path / f"lookonce-pilot.tmp-{HOST}-{gone}-0a1b2c3_")
    assert list(scratch_folders(tmp_path)) == []


def test_sweeping_changes_nothing_else(folder, site, images):
    site.build_once(images)
    before = {path: path.stat().st_mtime_ns for path in site.folder().rglob("*") if path.is_file()}
    sweep(site.folder(), EXPIRY_S)
    sweep(site.folder() / "nowhere", EXPIRY_S)
    assert {path: path.stat().st_mtime_ns for path in site.folder().rglob("*") if path.is_file()} == before


def test_a_build_removes_what_dead_processes_left(site, images, gone):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(5))
    folder = site.folder()
    writer = f"tmp-{HOST}-{gone}-0a1b2c3d"
    for name in ("shards/shard-00002.safetensors", "receipts/shard-00002.json", "plan-00001.json", "index.safetensors"):
        write(folder / f"{name}.{writer}")
    claim(folder, "shard-00001", DEAD)
    write(folder / "shards" / "shard-00002.safetensors")  # renamed, and then the power went
    assert site.build(images).num_missing == 0
    assert not site.leftovers()


def test_a_worker_first_removes_what_another_left_of_its_shard(site, images):
    there = []
    left = site.folder() / "shards" / "shard-00000.safetensors.tmp-elsewhere-1-0a1b2c3d"
    left.parent.mkdir(parents=True)
    write(left)
    site.build(images, site.Tower(on_image=lambda number: there.append(left.exists())))
    assert not any(there)


def test_a_build_with_nothing_to_do_removes_leftovers_too(site, images, gone):
    site.build_once(images)
    write(site.folder() / "receipts" / f"shard-00000.json.tmp-{HOST}-{gone}-0a1b2c3d")
    claim(site.folder(), "shard-00000", DEAD)
    site.build(images, site.no_tower)
    assert not site.leftovers()


# Uses: a note counts while the run folder exists and is not empty.


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
    assert [path.name for path in (cache / "uses").iterdir()] == [use_path(cache, run).name]


def test_a_use_ends_when_the_run_folder_is_removed_or_empty(tmp_path, run):
    other = run.with_name("b")
    shutil.copytree(run, other)
    for folder in (run, other):
        note_use(tmp_path / "cache", folder)
    assert [use.run for use in uses(tmp_path / "cache")] == [str(run), str(other)]
    shutil.rmtree(run)
    (other / "run.json").unlink()
    assert uses(tmp_path / "cache") == []


def test_an_unused_cache_has_no_uses(tmp_path):
    assert uses(tmp_path) == [] and uses(tmp_path / "nothing") == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run": 3, "host": "", "time": 0}', "\x00"])
def test_a_broken_note_is_not_a_use(tmp_path, content):
    (tmp_path / "uses").mkdir()
    (tmp_path / "uses" / "0123456789abcdef.json").write_text(content)
    assert uses(tmp_path) == []


def test_a_read_only_cache_is_no_error(tmp_path, run):
    (tmp_path / "file").write_text("")
    note_use(tmp_path / "file", run)  # as on a read-only disk, also for root
    assert uses(tmp_path / "file") == []


def test_a_note_has_the_specified_keys(tmp_path, run):
    note_use(tmp_path, run)
    assert json.loads(use_path(tmp_path, run).read_text()).keys() == {"run", "host", "time"}
    assert len(use_path(tmp_path, run).stem) == 16
