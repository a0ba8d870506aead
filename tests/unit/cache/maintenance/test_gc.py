"""gc: it lists what is there, deletes rubbish only, whole caches only by name and unused, and never what is foreign."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from lookonce.cache.maintenance.gc import collect
from lookonce.cache.maintenance.inventory import KNOWN, CacheInfo, cache_folders
from lookonce.cache.maintenance.staging import stage
from lookonce.cache.store.claims import CLAIMS, Claims, Worker
from lookonce.cache.store.manifest import extend_plan, read_plan
from lookonce.cache.store.plan import PlannedImage, Shard
from lookonce.cache.store.receipts import receipt_path
from lookonce.cache.store.shards import shard_path
from lookonce.cache.store.uses import note_use
from lookonce.errors import CacheError, UsageError
from lookonce.files import TEMPORARY_MARK, scratch_folder, writer_host

GONE = "4999999"
"""The number of no process: more than Linux counts to by default."""


@pytest.fixture
def folder(site, images) -> Path:
    site.build(images)
    return site.folder()


@pytest.fixture
def root(folder) -> Path:
    return folder.parent


@pytest.fixture
def other(site, images, folder) -> Path:
    """A second cache below the same root."""
    compute = site.use("bfloat16")
    site.build(images, lambda: site.Tower(dtype=compute))
    return site.folder()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def litter(folder: Path) -> dict[Path, str]:
    """One leftover of each kind, and its kind."""
    writer = f"{TEMPORARY_MARK}{writer_host()}-{GONE}-0123abcd"
    claim = folder / CLAIMS / "shard-00098.json"
    claim.parent.mkdir(exist_ok=True)
    worker = Worker.this_process()
    claim.write_text(json.dumps({"shard": "shard-00098", "worker": asdict(worker) | {"pid": int(GONE)}}))
    found = {
        folder / "shards" / f"shard-00097.safetensors{writer}": "temporary file",
        folder / f"index.safetensors{writer}": "temporary file",
        shard_path(folder, "shard-00096"): "unfinished shard",
    }
    for path in found:
        path.write_bytes(bytes(1000))
    return found | {claim: "dead claim"}


def only(report) -> CacheInfo:
    [cache] = report.caches
    return cache


def test_a_cache_is_listed_with_all_that_matters(root, folder, images):
    cache = only(collect(root))
    assert (cache.id, cache.model, cache.dtype, cache.num_images) == (folder.name, "fake", "float32", 8)
    assert (cache.is_complete, cache.num_workers, cache.used_by, cache.leftovers, cache.foreign) == (
        True,
        0,
        [],
        [],
        [],
    )
    assert cache.size_bytes == sum((folder / name).stat().st_size for name in files(folder))
    report = collect(root)
    assert folder.name in report.text() and "complete" in report.text() and "no leftovers" in report.text()
    json.dumps(asdict(report), default=str)


def test_listing_changes_nothing(root, folder):
    litter(folder)
    before = files(folder)
    collect(root)
    assert files(folder) == before


def test_all_files_that_a_build_a_use_and_a_staging_leave_are_known(site, folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    note_use(folder, run)
    extend_plan(folder, read_plan(folder), [])
    (site.path / "bad.png").write_text("no image")
    site.build(site.index(*site.path.glob("*.png")))
    staged = stage(folder, tmp_path / "local").folder
    for place in (folder, staged):
        assert files(place) and all(KNOWN.fullmatch(name) for name in files(place)), files(place)


def test_several_caches_are_listed_and_one_may_be_named(root, folder, other):
    assert {cache.folder for cache in collect(root).caches} == {folder, other}
    assert only(collect(other)).dtype == "bfloat16"


def test_an_unfinished_cache_is_not_complete(root, folder):
    planned = Shard("shard-00099", (PlannedImage("f" * 64, 1, ("x.png",)),))
    extend_plan(folder, read_plan(folder), [planned])
    assert not only(collect(root)).is_complete
    settled = Shard("shard-00099", read_plan(folder).shards[0].images)
    (folder / "plan-00001.json").unlink()
    extend_plan(folder, read_plan(folder), [settled])
    assert only(collect(root)).is_complete


def test_leftovers_are_listed_with_kind_and_size_and_go_with_delete(root, folder):
    before = files(folder)
    left = litter(folder)
    cache = only(collect(root))
    assert {leftover.path: leftover.kind for leftover in cache.leftovers} == left
    assert all(leftover.size_bytes for leftover in cache.leftovers) and not cache.foreign
    assert "--delete removes 4 leftovers" in collect(root).text()
    report = collect(root, delete=True)
    assert set(report.deleted) == set(left) and files(folder) == before
    assert report.deleted_bytes == sum(leftover.size_bytes for leftover in cache.leftovers)
    assert only(report).leftovers == [] and "deleted 4 leftovers" in report.text()


def test_what_killed_measurements_left_beside_the_caches_is_listed_and_goes_with_delete(root, folder, tmp_path):
    (tmp_path / "mine").write_text("mine")
    left = root / f"lookonce-bench{TEMPORARY_MARK}{writer_host()}-{GONE}-0a1b2c3_"
    shutil.copytree(folder, left / folder.name)
    (left / "link").symlink_to(tmp_path / "mine")
    before, num_bytes = files(folder), sum((left / name).lstat().st_size for name in files(left))
    with scratch_folder(root, "pilot") as living:
        report = collect(root)
        assert [(found.path, found.kind, found.size_bytes) for found in report.scratch] == [
            (left, "scratch folder", num_bytes)
        ]
        assert f"scratch folder: {left.name}, " in report.text() and "--delete removes 1 leftover" in report.text()
        assert only(report).folder == folder and left.exists()
        report = collect(root, delete=True)
        assert (report.deleted, report.deleted_bytes, report.scratch) == ([left], num_bytes, [])
        assert living.exists() and not left.exists() and (tmp_path / "mine").exists() and files(folder) == before


def test_what_living_processes_write_is_no_leftover(root, folder):
    path = folder / "shards" / f"shard-00005.safetensors{TEMPORARY_MARK}{writer_host()}-{os.getpid()}-0123abcd"
    path.write_bytes(b"")
    with Claims(folder, Worker.this_process()) as claims:
        assert claims.take("shard-00006", 1)
        shard_path(folder, "shard-00006").write_bytes(b"just renamed")
        cache = only(collect(root, delete=True))
        assert (cache.num_workers, cache.leftovers, cache.foreign) == (1, [], [])
        assert "1 worker alive" in collect(root).text()
    assert path.exists() and shard_path(folder, "shard-00006").exists()


def test_a_quarantine_is_no_leftover(site, images, root):
    (site.path / "bad.png").write_text("no image")
    site.build(site.index(*images.key_of, site.path / "bad.png"))
    collect(root if root.exists() else site.folder().parent, delete=True)
    assert (site.folder() / "quarantine.jsonl").exists()


def test_shards_whose_receipts_are_all_lost_are_kept(root, folder):
    shutil.rmtree(folder / "receipts")
    report = collect(root, delete=True)
    assert report.deleted == [] and "write them anew with: lookonce cache repair RUN.yaml" in only(report).problem
    assert list((folder / "shards").iterdir())


def test_a_shard_that_lost_its_receipt_alone_is_a_leftover(root, folder):
    receipt_path(folder, "shard-00001").unlink()
    assert collect(root, delete=True).deleted == [shard_path(folder, "shard-00001")]


def test_a_whole_cache_goes_when_it_is_named(root, folder, other):
    report = collect(root, delete=True, cache_id=folder.name[:8])
    assert not folder.exists() and files(other)
    assert [cache.folder for cache in report.caches] == [other]
    assert report.deleted_bytes > 0 and f"deleted cache {folder.name}: {len(report.deleted)} files" in report.text()


@pytest.mark.parametrize(
    ("cache_id", "message"),
    [
        ("1234567", "too short to delete by; give at least 8 digits"),
        ("", "too short"),
        ("01234567", "means 0 caches"),
        ("../../etc", "means 0 caches"),
    ],
)
def test_a_cache_must_be_named_well(root, folder, cache_id, message):
    before = files(root)
    with pytest.raises(UsageError, match=message):
        collect(root, delete=True, cache_id=cache_id)
    assert files(root) == before


def test_an_ambiguous_name_deletes_nothing(root, folder):
    shutil.copytree(folder, root / f"{folder.name}-copy")
    with pytest.raises(UsageError, match=f"means 2 caches in {root}; there is: {folder.name}"):
        collect(root, delete=True, cache_id=folder.name)
    assert len(cache_folders(root)) == 2


def test_a_name_without_delete_is_refused(root, folder):
    with pytest.raises(UsageError, match="add --delete"):
        collect(root, cache_id=folder.name)


def test_a_cache_with_a_living_worker_is_not_deleted(root, folder):
    before = files(folder)
    with Claims(folder, Worker.this_process()) as claims:
        claim = claims.take("shard-00009", 1)
        with pytest.raises(CacheError, match="1 worker alive"):
            collect(root, delete=True, cache_id=folder.name)
        claims.release(claim)
    assert files(folder) == before


def test_a_cache_that_a_run_uses_is_not_deleted_until_the_run_goes(root, folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    note_use(folder, run)
    assert only(collect(root)).used_by == [str(run)] and f"used by {run}" in collect(root).text()
    with pytest.raises(CacheError, match=f"is used by {run}; its use ends when"):
        collect(root, delete=True, cache_id=folder.name)
    assert files(folder)
    shutil.rmtree(run)
    collect(root, delete=True, cache_id=folder.name)
    assert not folder.exists()


def test_foreign_files_are_listed_and_never_deleted(root, folder, tmp_path):
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "gold").write_text("gold")
    (folder / "notes.txt").write_text("mine")
    (folder / "shards" / "thesis.pdf").write_text("mine")
    (folder / "mine").mkdir()
    (folder / "mine" / "shard-00000.safetensors").write_text("mine")
    (folder / "link").symlink_to(treasure)
    foreign = {"notes.txt", "shards/thesis.pdf", "mine/shard-00000.safetensors", "link"}
    assert set(only(collect(root)).foreign) == foreign
    assert "not ours: link, mine/shard-00000.safetensors" in collect(root).text()
    assert collect(root, delete=True).deleted == []
    report = collect(root, delete=True, cache_id=folder.name)
    assert {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    } == foreign
    assert (treasure / "gold").exists() and "that are not ours stay" in report.text()


def test_folders_without_our_manifest_are_not_looked_at(root, folder, tmp_path):
    for name, content in {"a": None, "b": "{", "c": "[]", "d": '{"format_version": 1}'}.items():
        (root / name / "shards").mkdir(parents=True)
        (root / name / "shards" / "shard-00000.safetensors").write_text("mine")
        if content is not None:
            (root / name / "manifest.json").write_text(content)
    (root / "file").write_text("")
    assert cache_folders(root) == [folder]
    before = files(root)
    collect(root, delete=True)
    with pytest.raises(UsageError):
        collect(root / "b", delete=True, cache_id="b" * 8)
    assert files(root) == before


def test_a_cache_of_another_version_is_listed_and_may_be_deleted(root, folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 1}))
    cache = only(collect(root))
    assert cache.num_images is None and "format version 1" in cache.problem and "unreadable" in collect(root).text()
    collect(root, delete=True, cache_id=folder.name)
    assert not folder.exists()


def test_a_damaged_cache_is_listed_with_what_is_wrong(root, folder):
    receipt_path(folder, "shard-00000").write_text("{")
    cache = only(collect(root))
    assert "is not what was written" in cache.problem and not cache.is_complete


def test_an_interrupted_deletion_is_gone_on_with(root, folder, monkeypatch):
    unlink, left = Path.unlink, 4

    def killed(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            collect(root, delete=True, cache_id=folder.name)
    assert only(collect(root)).num_shards < len(list((folder / "shards").iterdir()))
    collect(root, delete=True, cache_id=folder.name)
    assert not folder.exists()


def test_where_nothing_is_there_is_nothing(tmp_path):
    with pytest.raises(CacheError, match="no folder of caches at"):
        collect(tmp_path / "nothing")
    assert collect(tmp_path).caches == []
