"""Garbage collection: caches are listed; leftovers and named, unused caches are deleted; foreign files never."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from lookonce.cache.maintenance.gc import KNOWN, CacheInfo, cache_folders, collect_garbage
from lookonce.cache.maintenance.staging import stage
from lookonce.cache.store.claims import CLAIMS, Claims, note_use
from lookonce.cache.store.metadata import PlannedImage, Shard, extend_plan, read_plan, receipt_path
from lookonce.cache.store.shards import shard_path
from lookonce.claim_file import Process
from lookonce.errors import CacheError, UsageError
from lookonce.files import TEMPORARY_MARK, scratch_folder, writer_host


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def only(report) -> CacheInfo:
    [cache] = report.caches
    return cache


def test_a_cache_is_listed_with_its_content_and_state_and_a_problem(caches, folder, images):
    cache = only(collect_garbage(caches))
    assert (cache.id, cache.model, cache.dtype, cache.num_images) == (folder.name, "fake", "float32", 8)
    assert cache.is_complete and not (cache.num_workers or cache.used_by or cache.leftovers or cache.foreign)
    assert cache.size_bytes == sum((folder / name).stat().st_size for name in files(folder))
    report = collect_garbage(caches)
    assert folder.name in report.text() and "complete" in report.text() and "no leftovers" in report.text()
    json.dumps(asdict(report), default=str)
    receipt_path(folder, "shard-00000").write_text("{")
    cache = only(collect_garbage(caches))
    assert "is damaged" in cache.problem and not cache.is_complete


def test_all_files_of_a_build_a_use_and_a_staging_are_recognised(site, folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    note_use(folder, run)
    extend_plan(folder, read_plan(folder), [])
    (site.path / "bad.png").write_text("no image")
    site.build(site.index(*site.path.glob("*.png")))
    staged = stage(folder, tmp_path / "local").folder
    for cache in (folder, staged):
        assert files(cache) and all(KNOWN.fullmatch(name) for name in files(cache)), files(cache)


def test_a_cache_is_complete_when_every_planned_image_is_stored(caches, folder):
    planned = Shard("shard-00099", (PlannedImage("f" * 64, 1, ("x.png",)),))
    extend_plan(folder, read_plan(folder), [planned])
    assert not only(collect_garbage(caches)).is_complete
    stored = Shard("shard-00099", read_plan(folder).shards[0].images)
    (folder / "plan-00001.json").unlink()
    extend_plan(folder, read_plan(folder), [stored])
    assert only(collect_garbage(caches)).is_complete


GONE = "4999999"
"""A process id that is never in use: larger than Linux's default maximum."""


def add_leftovers(folder: Path) -> dict[Path, str]:
    """Create a leftover of each kind; returns the kind by path."""
    writer = f"{TEMPORARY_MARK}{writer_host()}-{GONE}-0123abcd"
    claim = folder / CLAIMS / "shard-00098.json"
    claim.parent.mkdir(exist_ok=True)
    worker = Process.this()
    claim.write_text(json.dumps({"shard": "shard-00098", "worker": asdict(worker) | {"pid": int(GONE)}}))
    found = {
        folder / "shards" / f"shard-00097.safetensors{writer}": "temporary file",
        folder / f"index.safetensors{writer}": "temporary file",
        shard_path(folder, "shard-00096"): "unfinished shard",
    }
    for path in found:
        path.write_bytes(bytes(1000))
    return found | {claim: "dead claim"}


def test_leftovers_are_listed_with_kind_and_size_and_only_deleted_on_request(folder_with_quarantine):
    caches, folder = folder_with_quarantine.parent, folder_with_quarantine
    before = files(folder)
    left = add_leftovers(folder)
    cache = only(collect_garbage(caches))
    assert files(folder) == before | {str(path.relative_to(folder)) for path in left}
    assert {leftover.path: leftover.kind for leftover in cache.leftovers} == left
    assert all(leftover.size_bytes for leftover in cache.leftovers) and not cache.foreign
    assert "--delete removes 4 leftovers" in collect_garbage(caches).text()
    report = collect_garbage(caches, delete=True)
    assert set(report.deleted) == set(left) and files(folder) == before
    assert report.deleted_bytes == sum(leftover.size_bytes for leftover in cache.leftovers)
    assert only(report).leftovers == [] and "deleted 4 leftovers" in report.text()


def test_scratch_folders_of_killed_measurements_are_listed_and_deleted_on_request(caches, folder, tmp_path):
    (tmp_path / "mine").write_text("mine")
    left = caches / f"lookonce-bench{TEMPORARY_MARK}{writer_host()}-{GONE}-0a1b2c3_"
    shutil.copytree(folder, left / folder.name)
    (left / "link").symlink_to(tmp_path / "mine")
    before, num_bytes = files(folder), sum((left / name).lstat().st_size for name in files(left))
    with scratch_folder(caches, "pilot") as living:
        report = collect_garbage(caches)
        assert [(found.path, found.kind, found.size_bytes) for found in report.scratch] == [
            (left, "scratch folder", num_bytes)
        ]
        assert f"scratch folder: {left.name}, " in report.text() and "--delete removes 1 leftover" in report.text()
        assert only(report).folder == folder and left.exists()
        report = collect_garbage(caches, delete=True)
        assert (report.deleted, report.deleted_bytes, report.scratch) == ([left], num_bytes, [])
        assert living.exists() and not left.exists() and (tmp_path / "mine").exists() and files(folder) == before


def test_files_of_living_processes_are_not_leftovers_and_keep_their_cache(caches, folder):
    path = folder / "shards" / f"shard-00005.safetensors{TEMPORARY_MARK}{writer_host()}-{os.getpid()}-0123abcd"
    path.write_bytes(b"")
    with Claims(folder, Process.this()) as claims:
        assert claims.take("shard-00006", 1)
        shard_path(folder, "shard-00006").write_bytes(b"just renamed")
        cache = only(collect_garbage(caches, delete=True))
        assert (cache.num_workers, cache.leftovers, cache.foreign) == (1, [], [])
        assert "1 worker alive" in collect_garbage(caches).text()
        with pytest.raises(CacheError, match="is in use by .*; wait until it has ended, or stop it"):
            collect_garbage(caches, delete=True, cache_id=folder.name)
    assert path.exists() and shard_path(folder, "shard-00006").exists()


def test_a_whole_cache_is_deleted_by_its_name(caches, folder, other):
    assert {cache.folder for cache in collect_garbage(caches).caches} == {folder, other}
    assert only(collect_garbage(other)).dtype == "bfloat16"
    report = collect_garbage(caches, delete=True, cache_id=folder.name[:8])
    assert not folder.exists() and files(other)
    assert [cache.folder for cache in report.caches] == [other]
    assert report.deleted_bytes > 0 and f"deleted cache {folder.name}: {len(report.deleted)} files" in report.text()


@pytest.mark.parametrize(
    ("cache_id", "message"),
    [
        ("1234567", "too short to name a cache to delete; give at least 8 digits"),
        ("", "too short"),
        ("01234567", "matches 0 caches"),
        ("../../etc", "matches 0 caches"),
        ("NAME", "matches 2 caches in FOLDER; choose one of: NAME"),
    ],
)
def test_a_short_unknown_or_ambiguous_name_deletes_nothing(caches, folder, cache_id, message):
    shutil.copytree(folder, caches / f"{folder.name}-copy")
    cache_id = cache_id.replace("NAME", folder.name)
    message = message.replace("NAME", folder.name).replace("FOLDER", str(caches))
    before = files(caches)
    with pytest.raises(UsageError, match=message):
        collect_garbage(caches, delete=True, cache_id=cache_id)
    with pytest.raises(UsageError, match="add --delete"):
        collect_garbage(caches, cache_id=folder.name)
    assert files(caches) == before


def test_a_cache_is_not_deleted_before_the_runs_that_use_it(caches, folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    note_use(folder, run)
    assert only(collect_garbage(caches)).used_by == [str(run)] and f"used by {run}" in collect_garbage(caches).text()
    with pytest.raises(CacheError, match=f"is used by {run}; delete or move that run folder first"):
        collect_garbage(caches, delete=True, cache_id=folder.name)
    assert files(folder)
    shutil.rmtree(run)
    collect_garbage(caches, delete=True, cache_id=folder.name)
    assert not folder.exists()


def test_foreign_files_are_listed_and_never_deleted(caches, folder, tmp_path):
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("gold")
    (folder / "notes.txt").write_text("mine")
    (folder / "shards" / "thesis.pdf").write_text("mine")
    (folder / "mine").mkdir()
    (folder / "mine" / "shard-00000.safetensors").write_text("mine")
    (folder / "link").symlink_to(treasure)
    foreign = {"notes.txt", "shards/thesis.pdf", "mine/shard-00000.safetensors", "link"}
    assert set(only(collect_garbage(caches)).foreign) == foreign
    assert "not made by lookonce: link, mine/shard-00000.safetensors" in collect_garbage(caches).text()
    assert collect_garbage(caches, delete=True).deleted == []
    report = collect_garbage(caches, delete=True, cache_id=folder.name)
    assert {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    } == foreign
    assert (treasure / "gold").exists() and "kept what lookonce did not make: " in report.text()


def test_folders_without_our_manifest_are_ignored(caches, folder, tmp_path):
    for name, content in {"a": None, "b": "{", "c": "[]", "d": '{"format_version": 1}'}.items():
        (caches / name / "shards").mkdir(parents=True)
        (caches / name / "shards" / "shard-00000.safetensors").write_text("mine")
        if content is not None:
            (caches / name / "manifest.json").write_text(content)
    (caches / "file").write_text("")
    assert cache_folders(caches) == [folder]
    before = files(caches)
    collect_garbage(caches, delete=True)
    with pytest.raises(UsageError):
        collect_garbage(caches / "b", delete=True, cache_id="b" * 8)
    assert files(caches) == before


def test_a_cache_of_another_version_is_listed_and_may_be_deleted(caches, folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 1}))
    cache = only(collect_garbage(caches))
    assert cache.num_images is None and "format version 1" in cache.problem
    assert "unreadable" in collect_garbage(caches).text()
    collect_garbage(caches, delete=True, cache_id=folder.name)
    assert not folder.exists()


def test_an_interrupted_deletion_can_be_resumed(caches, folder, monkeypatch):
    unlink, left = Path.unlink, 2

    def killed(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= path.parent.name == "receipts"
        if left == 0 and path.parent.name == "receipts":
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            collect_garbage(caches, delete=True, cache_id=folder.name)
    assert only(collect_garbage(caches)).num_shards < len(list((folder / "shards").iterdir()))
    collect_garbage(caches, delete=True, cache_id=folder.name)
    assert not folder.exists()
