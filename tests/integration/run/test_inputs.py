"""A run's inputs: its cache, a plan instead of hashing, images that changed in between, and staged copies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lookonce.cache.maintenance.staging import stage
from lookonce.cache.store.metadata import read_plan
from lookonce.datasets import images as images_module
from lookonce.errors import FeaturesMissing
from lookonce.run.open import TO_BUILD, TO_BUILD_BY_PLAN, open_run

pytestmark = pytest.mark.usefixtures("one_tower", "no_fsync")

NUM_IMAGES = 6


@pytest.fixture
def frames(tmp_path: Path, files_are_old: None) -> list[Path]:
    """Image files, two of them the same, and `records.jsonl` with two questions about each."""
    paths = [tmp_path / f"{number}.png" for number in range(NUM_IMAGES)]
    for number, path in enumerate(paths):
        save_noise(path, number)
    shutil.copy(paths[0], tmp_path / "copy.png")
    names = [*(path.name for path in paths), "copy.png"]
    write_records(tmp_path / "records.jsonl", names * 2)
    return paths


def save_noise(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    Image.fromarray(rng.integers(0, 256, (*rng.integers(40, 200, 2), 3), dtype=np.uint8)).save(path)


def write_records(path: Path, names: list[str]) -> None:
    lines = [json.dumps({"image_filename": name, "question": "Is it?", "answer": "yes"}) for name in names]
    path.write_text("\n".join(lines))


@pytest.fixture
def run(make_run, frames, tmp_path):
    return make_run(data={"train": str(tmp_path / "records.jsonl"), "val": [], "test": []})


# The cache.


def test_a_run_opens_its_cache_only_if_it_holds_all_images(make_run, sample):
    val = str(sample / "val.jsonl")
    few = open_run(make_run(data={"train": val, "val": val, "test": val}), TO_BUILD)
    report = few.build()
    assert report.num_encoded == few.images.num_distinct == len(few.open_cache())
    everything = open_run(make_run(), TO_BUILD)
    [first, *_] = everything.records["train"]
    with pytest.raises(FeaturesMissing) as caught:
        everything.open_cache()
    num_missing = everything.images.num_files - few.images.num_files
    expected = f"lacks the features of {num_missing} of {everything.images.num_files} images"
    assert expected in str(caught.value)
    assert f"{first.images[0]} ({first.origin}): run: lookonce cache build" in str(caught.value)


# A plan instead of hashing.


def test_inputs_that_trust_the_plan_read_no_image_and_are_the_same(run, monkeypatch):
    hashed = open_run(run, TO_BUILD)
    hashed.write_plan()
    for name in ("_read_file", "_read_archive"):
        monkeypatch.setattr(images_module, name, lambda path, *_: pytest.fail(f"{path} was read"))
    monkeypatch.setattr(images_module, "inspect_images", lambda *_: pytest.fail("images were hashed"))
    trusting = open_run(run, TO_BUILD_BY_PLAN)
    assert trusting.images.key_of == hashed.images.key_of
    assert list(trusting.images.path_of) == list(hashed.images.path_of)
    assert trusting.identity() == hashed.identity()


def test_only_files_that_the_plan_lacks_are_hashed(run, tmp_path, monkeypatch):
    assert open_run(run, TO_BUILD_BY_PLAN).images == open_run(run, TO_BUILD).images
    open_run(run, TO_BUILD).write_plan()
    save_noise(tmp_path / "new.png", 100)
    write_records(tmp_path / "records.jsonl", ["0.png", "new.png", "gone.png"])
    hashed, read, look = open_run(run, TO_BUILD).images, [], images_module.inspect_images
    monkeypatch.setattr(images_module, "inspect_images", lambda paths: read.extend(paths) or look(paths))
    trusting = open_run(run, TO_BUILD_BY_PLAN).images
    assert sorted(path.name for path in read) == ["gone.png", "new.png"]
    assert (trusting.key_of, trusting.path_of) == (hashed.key_of, hashed.path_of)
    assert trusting.unusable == hashed.unusable and trusting.unusable


def test_an_image_deleted_after_planning_is_reported_and_tried_again_by_the_next_build(run, frames):
    open_run(run, TO_BUILD).write_plan()
    gone, content, age = frames[1], frames[1].read_bytes(), frames[1].stat().st_mtime
    gone.unlink()
    for _ in range(2):
        trusting = open_run(run, TO_BUILD_BY_PLAN)
        report = trusting.build()
        [(name, reason)] = report.quarantined.items()
        assert name == str(gone) and "No such file" in reason
        assert report.num_missing == 0
        with pytest.raises(FeaturesMissing, match=f"{gone} .*quarantined"):
            trusting.open_cache()
    gone.write_bytes(content)
    os.utime(gone, (age, age))
    report = open_run(run, TO_BUILD_BY_PLAN).build()
    assert (report.num_encoded, report.quarantined) == (1, {})
    assert len(open_run(run, TO_BUILD_BY_PLAN).open_cache()) == NUM_IMAGES


@pytest.mark.parametrize(("when", "age"), [("before its shard is made", 0), ("after its shard was made", 3600)])
def test_an_image_edited_after_planning_is_never_counted_as_done(run, frames, when, age):
    open_run(run, TO_BUILD).write_plan()
    if when == "after its shard was made":
        open_run(run, TO_BUILD_BY_PLAN).build(worker=(0, 2))
    save_noise(frames[1], 1000)
    os.utime(frames[1], (frames[1].stat().st_mtime - age,) * 2)
    report = open_run(run, TO_BUILD_BY_PLAN).build(worker=(0, 2))
    assert (report.num_missing, report.num_wanted, report.quarantined) == (0, NUM_IMAGES, {})
    assert frames[1] in open_run(run, TO_BUILD_BY_PLAN).images.key_of
    assert open_run(run, TO_BUILD).build().num_encoded == 0
    assert len(read_plan(open_run(run, TO_BUILD).cache_folder).shards) == 2


# A staged copy.


@pytest.fixture
def staged_run(make_run, run, tmp_path, monkeypatch):
    """The same run with `cache.stage` set by an environment variable."""
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "local"))
    return make_run(data=run.data.model_dump(), cache={"stage": "$NODE_DISK"})


def test_a_staged_copy_is_read_if_it_holds_all_images(staged_run, tmp_path):
    inputs = open_run(staged_run, TO_BUILD)
    folder = inputs.build().folder
    assert inputs.open_cache().folder == folder
    stage(folder, tmp_path / "local")
    assert inputs.open_cache().folder == tmp_path / "local" / folder.name
    shutil.rmtree(folder)
    assert len(inputs.open_cache()) == NUM_IMAGES


def test_a_staged_copy_that_lacks_an_image_or_is_damaged_is_not_used(staged_run, tmp_path):
    inputs = open_run(staged_run, TO_BUILD)
    folder = inputs.build().folder
    stage(folder, tmp_path / "local")
    save_noise(tmp_path / "new.png", 100)
    write_records(tmp_path / "records.jsonl", ["0.png", "new.png"])
    more = open_run(staged_run, TO_BUILD)
    more.build()
    assert more.open_cache().folder == folder
    [shard] = (tmp_path / "local").rglob("shard-*.safetensors")
    shard.write_bytes(b"cut short")
    assert inputs.open_cache().folder == folder


def test_an_image_with_two_files_is_encoded_from_either(run, frames):
    open_run(run, TO_BUILD).write_plan()
    frames[0].unlink()  # copy.png has its bytes
    report = open_run(run, TO_BUILD_BY_PLAN).build(worker=(0, 1))
    assert (list(report.quarantined), report.num_encoded) == ([str(frames[0])], NUM_IMAGES)
