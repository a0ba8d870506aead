"""Leftovers: what the dead left is found and cleared away, what the living have in work is not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.store import leftovers
from lookonce.cache.store.claims import Claim, Claims, Worker
from lookonce.cache.store.leftovers import (
    SCRATCH_EXPIRY_S,
    dead_claims,
    scratch_folders,
    sweep,
    temporaries,
    unfinished_shards,
)
from lookonce.cache.store.receipts import Receipt, write_receipt
from lookonce.files import scratch_folder, writer_host

EXPIRY_S = 60.0
ME = Worker.this_process()
DEAD = replace(ME, born=0.0)
HERE, HOST = os.getpid(), writer_host()


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("shards", "receipts", "claims"):
        (tmp_path / name).mkdir()
    return tmp_path


def claim(folder: Path, shard: str, worker: Worker) -> Claim:
    found = Claims(folder, worker, EXPIRY_S).take(shard, 1)
    assert found
    return found


def write(path: Path, age_s: float = 0) -> Path:
    path.write_text("content")
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
    return path


@pytest.mark.parametrize("place", ["", "shards", "receipts", "claims"])
@pytest.mark.parametrize(
    ("writer", "age_s", "is_rubbish"),
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
def test_a_temporary_file_is_rubbish_if_its_writer_is_gone_or_silent(folder, gone, place, writer, age_s, is_rubbish):
    names = writer.replace("HOST", HOST).replace("GONE", str(gone)).replace("HERE", str(HERE))
    path = write(folder / place / f"shard-00000.safetensors.tmp-{names}", age_s)
    assert list(temporaries(folder, EXPIRY_S)) == ([path] if is_rubbish else [])
    sweep(folder, EXPIRY_S)
    assert path.exists() != is_rubbish


def test_a_temporary_file_of_a_shard_in_work_is_its_claimants_business(folder, gone):
    held = claim(folder, "shard-00001", ME)
    mine, stale = (
        write(folder / "shards" / f"{shard}.safetensors.tmp-elsewhere-1-0a1b2c3d", EXPIRY_S + 5)
        for shard in ("shard-00001", "shard-00002")
    )
    assert list(temporaries(folder, EXPIRY_S)) == [stale]
    held.release()
    assert list(temporaries(folder, EXPIRY_S)) == [mine, stale]


def test_a_folder_is_no_temporary_file(folder, gone):
    (folder / f"lookonce-bench.tmp-{HOST}-{gone}-0a1b2c3d").mkdir()
    assert list(temporaries(folder, EXPIRY_S)) == []


def test_claims_of_the_dead_are_cleared_away_and_those_of_the_living_are_not(folder):
    living, dead, silent = (
        claim(folder, f"shard-0000{number}", worker) for number, worker in enumerate((ME, DEAD, ME))
    )
    paths = [folder / "claims" / f"shard-0000{number}.json" for number in range(3)]
    os.utime(paths[2], (1, 1))
    assert list(dead_claims(folder, EXPIRY_S)) == paths[1:]
    sweep(folder, EXPIRY_S)
    assert list((folder / "claims").iterdir()) == paths[:1]
    for each in (living, dead, silent):
        each.release()


def test_a_claim_that_was_taken_over_since_it_was_found_dead_is_not_cleared_away(folder, monkeypatch):
    living = claim(folder, "shard-00000", ME)
    monkeypatch.setattr(leftovers, "dead_claims", lambda *_: [folder / "claims" / "shard-00000.json"])
    sweep(folder, EXPIRY_S)
    assert living.is_held()
    living.release()


def test_shards_without_a_receipt_are_listed_unless_in_work_and_are_not_swept(folder):
    paths = [write(folder / "shards" / f"shard-0000{number}.safetensors") for number in range(4)]
    write_receipt(folder, Receipt("shard-00000", "", 0, 0, "", "", 0.0, 0.0, {}))
    living, dead = claim(folder, "shard-00001", ME), claim(folder, "shard-00002", DEAD)
    assert list(unfinished_shards(folder, EXPIRY_S)) == paths[2:]
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
def test_a_scratch_folder_is_a_leftover_if_its_process_is_gone_or_silent(tmp_path, gone, name, age_s, is_leftover):
    path = tmp_path / name.replace("HOST", HOST).replace("GONE", str(gone)).replace("HERE", str(HERE))
    (path / "shards").mkdir(parents=True)
    files = [write(path / "shards" / "old", 2 * SCRATCH_EXPIRY_S), write(path / "shards" / "new", age_s)]
    for each in (path / "shards", path):
        os.utime(each, (1, 1))
    for _ in range(2):  # looking makes nothing younger
        assert list(scratch_folders(tmp_path)) == ([path] if is_leftover else [])
    assert all(file.exists() for file in files)


def test_a_file_or_a_link_with_the_name_of_a_scratch_folder_is_none(tmp_path, gone):
    (tmp_path / "mine").mkdir()
    (tmp_path / f"lookonce-bench.tmp-{HOST}-{gone}-0a1b2c3_").symlink_to(tmp_path / "mine")
    write(tmp_path / f"lookonce-pilot.tmp-{HOST}-{gone}-0a1b2c3_")
    assert list(scratch_folders(tmp_path)) == []


def test_sweeping_leaves_everything_else_alone(folder, site, images):
    site.build(images)
    before = {path: path.stat().st_mtime_ns for path in site.folder().rglob("*") if path.is_file()}
    sweep(site.folder(), EXPIRY_S)
    sweep(site.folder() / "nowhere", EXPIRY_S)
    assert {path: path.stat().st_mtime_ns for path in site.folder().rglob("*") if path.is_file()} == before


def test_a_build_clears_away_what_the_dead_left(site, images, gone):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(5))
    folder = site.folder()
    writer = f"tmp-{HOST}-{gone}-0a1b2c3d"
    for name in ("shards/shard-00002.safetensors", "receipts/shard-00002.json", "plan-00001.json", "index.safetensors"):
        write(folder / f"{name}.{writer}")
    claim(folder, "shard-00001", DEAD)
    write(folder / "shards" / "shard-00002.safetensors")  # renamed, and then the power went
    assert site.build(images).num_missing == 0
    assert not site.rubbish()


def test_who_claims_a_shard_makes_room_first_by_clearing_away_what_another_left_of_it(site, images):
    there = []
    left = site.folder() / "shards" / "shard-00000.safetensors.tmp-elsewhere-1-0a1b2c3d"
    left.parent.mkdir(parents=True)
    write(left)
    site.build(images, site.Tower(on_image=lambda number: there.append(left.exists())))
    assert not any(there)


def test_a_build_with_nothing_to_do_clears_away_too(site, images, gone):
    site.build(images)
    write(site.folder() / "receipts" / f"shard-00000.json.tmp-{HOST}-{gone}-0a1b2c3d")
    claim(site.folder(), "shard-00000", DEAD)
    site.build(images, site.no_tower)
    assert not site.rubbish()
