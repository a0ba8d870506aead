"""Staging: an exact copy of a cache, which can be interrupted, and never changes the source."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.rows import files_in
from support.small_caches import features_in, flip

from lookonce.cache.maintenance import staging as module
from lookonce.cache.maintenance.staging import find_staged, stage
from lookonce.cache.maintenance.verify import verify
from lookonce.cache.store.claims import CLAIMS, using
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import finished_shards, receipt_path
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, DiskFull
from lookonce.files import TEMPORARY_MARK, writer_host


@pytest.fixture
def source(folder_with_quarantine) -> Path:
    return folder_with_quarantine


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.glob("[sr]*/*")}


def test_a_staged_cache_equals_its_source_which_is_not_changed(site, source, tmp_path):
    def stamps() -> dict[Path, tuple[int, int]]:
        paths = (path for path in source.rglob("*") if path.name != CLAIMS)
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}

    before = stamps()
    report = stage(source, tmp_path / "local")
    assert report.folder == tmp_path / "local" / source.name
    assert stamps() == before
    mine, theirs = files_in(report.folder), files_in(source)
    derived = {"index.safetensors", "index.xxh3"}
    assert {name: mine[name] for name in mine.keys() - derived} == {
        name: theirs[name] for name in theirs.keys() - derived if not name.startswith(CLAIMS)
    }
    assert features_in(report.folder) == features_in(source) and VisionCache.open(report.folder).failed
    assert verify(report.folder).problems == [] and verify(report.folder).index == "current"
    assert (report.num_copied, report.num_reused) == (report.num_shards, 0)
    json.dumps(asdict(report), default=str)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: shard_path(folder, "shard-00001").unlink(),
        lambda folder: receipt_path(folder, "shard-00001").unlink(),
        lambda folder: receipt_path(folder, "shard-00001").write_text("{"),
        lambda folder: os.truncate(shard_path(folder, "shard-00001"), 100),
    ],
    ids=["no shard", "no receipt", "another receipt", "another size"],
)
def test_only_missing_shards_are_copied_again(source, tmp_path, damage):
    folder = stage(source, tmp_path / "local").folder
    before = {path: stamp for path, stamp in stamps(folder).items() if "shard-00001" not in path.name}
    damage(folder)
    report = stage(source, tmp_path / "local")
    assert (report.num_copied, report.num_reused) == (1, report.num_shards - 1)
    assert stamps(folder).items() >= before.items()
    assert features_in(folder) == features_in(source)


def test_a_shard_that_is_copied_again_has_no_receipt_until_it_is_complete(source, tmp_path, monkeypatch):
    folder = stage(source, tmp_path / "local").folder
    os.truncate(shard_path(folder, "shard-00001"), 100)

    def interrupted(*arguments: object) -> None:
        assert not receipt_path(folder, "shard-00001").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage(source, tmp_path / "local")
    assert "shard-00001" not in finished_shards(folder)


def test_verify_finds_damage_of_the_copy_and_copies_again(source, tmp_path):
    folder = stage(source, tmp_path / "local").folder
    flip(shard_path(folder, "shard-00001"))
    assert stage(source, tmp_path / "local").num_copied == 0
    assert stage(source, tmp_path / "local", verify=True).num_copied == 1
    assert verify(folder).problems == []


@pytest.mark.parametrize("at", [-1, 100, 5000], ids=["image", "header", "header's blanks"])
def test_damage_in_the_source_is_reported_and_not_copied(source, tmp_path, at):
    flip(shard_path(source, "shard-00001"), at)
    report = stage(source, tmp_path / "local")
    assert {problem.shard for problem in report.problems} == {"shard-00001"}
    assert report.num_copied == report.num_shards - 1 and "lookonce cache repair RUN.yaml" in report.text()
    names = finished_shards(source)
    assert finished_shards(report.folder) == [name for name in names if name != "shard-00001"]
    assert not shard_path(report.folder, "shard-00001").exists()
    assert not list(report.folder.rglob(f"*{TEMPORARY_MARK}*"))


def test_without_a_shard_to_stage_nothing_is_written(source, tmp_path):
    with pytest.raises(CacheError, match="has none of the images asked for, .* lookonce cache build RUN.yaml"):
        stage(source, tmp_path / "local", ["f" * 64])
    shutil.rmtree(source / "receipts")
    for keys in (None, ["f" * 64]):
        with pytest.raises(CacheError, match="has no finished shard, .* lookonce cache build RUN.yaml"):
            stage(source, tmp_path / "local", keys)
    assert not (tmp_path / "local").exists()


def test_with_keys_only_their_shards_are_copied_and_more_can_follow(source, tmp_path, images):
    cache = VisionCache.open(source)
    first, *_, last = sorted(images.path_of, key=lambda key: cache.entry(key)[0])
    report = stage(source, tmp_path / "local", [first, "f" * 64])
    assert report.num_shards == 1 and finished_shards(report.folder) == [cache.entry(first)[0]]
    assert first in VisionCache.open(report.folder) and last not in VisionCache.open(report.folder)
    assert stage(source, tmp_path / "local", [first, last]).num_copied == 1
    assert stage(source, tmp_path / "local").num_reused == 2
    assert features_in(report.folder) == features_in(source)


def test_find_staged_opens_the_copy_if_it_has_all_keys_and_shards(site, source, tmp_path, images):
    local, keys = tmp_path / "local", list(images.path_of)
    assert find_staged(local, site.fingerprint, keys) is None
    stage(source, local, keys[:1])
    assert find_staged(local, site.fingerprint, keys) is None
    found = find_staged(local, site.fingerprint, keys[:1])
    assert found is not None and found.folder == local / source.name
    stage(source, local)
    found = find_staged(local, site.fingerprint, keys)
    assert found is not None and set(found.keys()) == set(keys)
    assert find_staged(local, replace(site.fingerprint, num_levels=3), keys) is None
    shard_path(local / source.name, "shard-00001").unlink()
    notes: list[str] = []
    assert find_staged(local, site.fingerprint, keys, notify=notes.append) is None
    [note] = notes
    assert note.startswith(f"the staged cache {local / source.name} is not used: ") and "shard-00001" in note


def test_without_room_nothing_is_written_and_a_full_disk_ends_the_staging_which_can_be_resumed(
    source, tmp_path, monkeypatch
):
    def full(descriptor: int, piece: memoryview, offset: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lookonce.disk_space.free_bytes", lambda folder: 1000)
        with pytest.raises(DiskFull, match="missing"):
            stage(source, tmp_path / "local")
    assert not (tmp_path / "local").exists()
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_all", full)
        with pytest.raises(DiskFull, match="No space left on device"):
            stage(source, tmp_path / "local")
    folder = tmp_path / "local" / source.name
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*")) and finished_shards(folder) == []
    assert stage(source, tmp_path / "local").problems == []


def test_a_place_with_another_cache_or_the_source_and_a_source_with_a_broken_receipt_are_refused(source, tmp_path):
    with pytest.raises(CacheError, match="is already in .*; name another folder"):
        stage(source, source.parent)
    with pytest.raises(CacheError, match="is not a cache"):
        stage(tmp_path, tmp_path / "local")
    target = tmp_path / "local" / source.name
    target.mkdir(parents=True)
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["fingerprint"]["dtype"] = "bfloat16"
    manifest["sha256"] = Fingerprint.from_json(manifest["fingerprint"]).sha256
    (target / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CacheMismatch, match="dtype"):
        stage(source, tmp_path / "local")
    flip(receipt_path(source, "shard-00001"))
    with pytest.raises(CacheCorrupt, match="shard-00001.json"):
        stage(source, tmp_path / "elsewhere")


def test_a_read_only_source_can_be_staged(source, tmp_path, monkeypatch):
    """Root may write everywhere, so opening files of the source for writing fails here."""
    really_open = os.open

    def guarded(path, flags, *args, **kwargs):
        if str(path).startswith(str(source)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return really_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", guarded)
    before = files_in(source)
    assert stage(source, tmp_path / "local").problems == []
    assert files_in(source) == before


def test_a_second_process_that_stages_into_a_folder_is_refused_until_the_first_has_ended(source, tmp_path):
    folder = tmp_path / "local" / source.name
    with using(folder, "lookonce cache stage", name="stage"), using(folder, "lookonce train"):
        with pytest.raises(CacheError, match=f"{folder} is in use by `lookonce cache stage`: process {os.getpid()} "):
            stage(source, tmp_path / "local")
    assert stage(source, tmp_path / "local").problems == []


def test_what_a_killed_staging_left_is_removed_and_copied(source, tmp_path):
    folder = stage(source, tmp_path / "local", verify=True).folder
    receipt_path(folder, "shard-00001").unlink()
    shard = shard_path(folder, "shard-00001")
    left = shard.rename(f"{shard}{TEMPORARY_MARK}{writer_host()}-4999999-0123abcd")
    assert stage(source, tmp_path / "local").num_copied == 1
    assert not left.exists() and features_in(folder) == features_in(source)
