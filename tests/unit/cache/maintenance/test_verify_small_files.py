"""Verify: damage of manifest and plan is found; unfinished shards and a broken index are not damage."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from lookonce.cache.maintenance.verify import verify
from lookonce.cache.store.metadata import (
    PLAN,
    PlannedImage,
    Shard,
    extend_plan,
    finished_shards,
    plan_path,
    read_plan,
    receipt_path,
)
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheError


@pytest.fixture
def folder(folder_with_quarantine) -> Path:
    return folder_with_quarantine


@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_flipped_bit_of_the_plan_is_found(folder, level, flip, found):
    for at in random.Random(0).sample(range((folder / PLAN).stat().st_size), 40):
        flip(folder / PLAN, at, at % 8)
        assert found(verify(folder, level)) == [("", "", "plan")]
        flip(folder / PLAN, at, at % 8)


def test_every_flipped_bit_of_the_fingerprint_in_the_manifest_is_found(folder, flip, found):
    path = folder / "manifest.json"
    content = path.read_bytes()
    begin, end = content.index(b'"fingerprint"'), content.index(b'"provenance"')
    for at in range(begin, end - 3, 5):
        flip(path, at, 0)
        assert found(verify(folder, "quick"))[0] == ("", "", "manifest")
        path.write_bytes(content)


def test_a_broken_manifest_does_not_hide_other_problems(folder, flip, found):
    (folder / "manifest.json").write_text("{")
    flip(shard_path(folder, "shard-00001"))
    assert [part for *_, part in found(verify(folder))] == ["manifest", "image"]


def test_shards_without_a_receipt_are_unfinished_and_not_damage(folder):
    receipt_path(folder, "shard-00001").unlink()
    new = Shard("shard-00099", (PlannedImage("f" * 64, 1, ("x.png",)),))
    extend_plan(folder, read_plan(folder), [new])
    shard_path(folder, "shard-00007").write_bytes(b"begun")
    report = verify(folder)
    assert report.problems == []
    assert report.unfinished == ["shard-00001", "shard-00007", "shard-00099"]
    assert "3 shards unfinished: shard-00001, shard-00007, shard-00099" in report.text()


def test_a_planned_shard_whose_images_others_have_is_not_unfinished(folder):
    images = read_plan(folder).shards[0].images
    extend_plan(folder, read_plan(folder), [Shard("shard-00099", images)])
    assert verify(folder, "quick").unfinished == []


def test_a_broken_index_is_reported_and_not_damage(folder, flip):
    flip(folder / "index.safetensors", 100)
    report = verify(folder, "quick")
    assert (report.problems, report.index) == ([], "not used")
    (folder / "index.safetensors").unlink()
    assert verify(folder, "quick").index == "none"


def test_a_folder_that_is_not_a_cache_is_refused(tmp_path):
    with pytest.raises(CacheError, match="is not a cache"):
        verify(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 99, "fingerprint": {}}')
    with pytest.raises(CacheError, match="format version 99"):
        verify(tmp_path)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_lost_plan_is_a_problem_outside_the_shards(folder, level, found):
    names = finished_shards(folder)
    (folder / PLAN).unlink()
    report = verify(folder, level)
    assert found(report) == [("", "", "plan")] and report.damaged == []
    assert f"{folder / PLAN} is missing: {len(names)} finished shards are in no plan" in report.text()
    assert "1 problem;" in report.text() and "repair it with: lookonce cache repair" in report.text()


def test_a_lost_last_file_of_the_plan_is_a_problem(site, folder):
    site.build(site.index(site.noise("new.png", 100)))
    plan_path(folder, 1).unlink()
    [problem] = verify(folder, "quick").problems
    assert problem.what == f"{plan_path(folder, 1)} is missing: 1 finished shard is in no plan"


def test_images_planned_after_a_plan_was_lost_make_an_intact_plan(site, folder):
    (folder / PLAN).unlink()
    site.build(site.index(site.noise("new.png", 100)))
    assert verify(folder, "quick").problems == []


def test_a_cache_without_finished_shards_needs_no_plan(folder):
    shutil.rmtree(folder / "receipts")
    (folder / PLAN).unlink()
    assert verify(folder, "quick").problems == []
