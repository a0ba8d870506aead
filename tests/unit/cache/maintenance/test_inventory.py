"""The inventory: caches are listed with their content, state and problems."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lookonce.cache.maintenance.gc import KNOWN, CacheInfo, collect_garbage
from lookonce.cache.maintenance.staging import stage
from lookonce.cache.store.claims import note_use
from lookonce.cache.store.metadata import PlannedImage, Shard, extend_plan, read_plan, receipt_path
from lookonce.errors import CacheError


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def only(report) -> CacheInfo:
    [cache] = report.caches
    return cache


def test_a_cache_is_listed_with_its_content_and_state(caches, folder, images):
    cache = only(collect_garbage(caches))
    assert (cache.id, cache.model, cache.dtype, cache.num_images) == (folder.name, "fake", "float32", 8)
    assert cache.is_complete and not (cache.num_workers or cache.used_by or cache.leftovers or cache.foreign)
    assert cache.size_bytes == sum((folder / name).stat().st_size for name in files(folder))
    report = collect_garbage(caches)
    assert folder.name in report.text() and "complete" in report.text() and "no leftovers" in report.text()
    json.dumps(asdict(report), default=str)


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


def test_all_caches_of_a_folder_are_listed_or_a_single_one(caches, folder, other):
    assert {cache.folder for cache in collect_garbage(caches).caches} == {folder, other}
    assert only(collect_garbage(other)).dtype == "bfloat16"


def test_a_cache_is_complete_when_every_planned_image_is_stored(caches, folder):
    planned = Shard("shard-00099", (PlannedImage("f" * 64, 1, ("x.png",)),))
    extend_plan(folder, read_plan(folder), [planned])
    assert not only(collect_garbage(caches)).is_complete
    stored = Shard("shard-00099", read_plan(folder).shards[0].images)
    (folder / "plan-00001.json").unlink()
    extend_plan(folder, read_plan(folder), [stored])
    assert only(collect_garbage(caches)).is_complete


def test_a_damaged_cache_is_listed_with_its_problem(caches, folder):
    receipt_path(folder, "shard-00000").write_text("{")
    cache = only(collect_garbage(caches))
    assert "is damaged" in cache.problem and not cache.is_complete


def test_an_empty_folder_has_no_caches_and_a_missing_one_is_refused(tmp_path):
    with pytest.raises(CacheError, match="no folder of caches at"):
        collect_garbage(tmp_path / "nothing")
    assert collect_garbage(tmp_path).caches == []
