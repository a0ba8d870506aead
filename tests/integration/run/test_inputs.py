"""A run's inputs: its cache alone, a plan instead of hashing, images that changed in between, and staged copies."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from support.rows import write_lines

from lookonce.cache.maintenance.staging import stage
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.store.metadata import read_plan
from lookonce.datasets import images as images_module
from lookonce.errors import FeaturesMissing
from lookonce.run.open import FROM_CACHE, TO_BUILD, TO_BUILD_BY_PLAN, OpenRun, open_run

pytestmark = pytest.mark.usefixtures("one_tower", "no_fsync")

NUM_IMAGES = 6


@pytest.fixture
def frames(site, tmp_path: Path, files_are_old: None) -> list[Path]:
    """Image files, two of them the same, and `records.jsonl` with two questions about each."""
    (tmp_path / "images").mkdir()
    paths = [site.noise(f"images/{number}.png", number) for number in range(NUM_IMAGES)]
    shutil.copy(paths[0], tmp_path / "images" / "copy.png")
    write_records(tmp_path, [*(path.name for path in paths), "copy.png"] * 2)
    return paths


def write_records(folder: Path, names: list[str]) -> None:
    rows = ({"image_filename": f"images/{name}", "question": "Is it?", "answer": "yes"} for name in names)
    write_lines(folder / "records.jsonl", *rows)


@pytest.fixture
def run(make_run, frames, tmp_path):
    return make_run(data={"train": str(tmp_path / "records.jsonl"), "val": [], "test": []})


@pytest.fixture
def built_inputs(run) -> OpenRun:
    """The run's inputs, hashed and built."""
    inputs = open_run(run, TO_BUILD)
    inputs.build()
    return inputs


def no_reading(monkeypatch):
    for name in ("_read_file", "_read_archive"):
        monkeypatch.setattr(images_module, name, lambda path, *_: pytest.fail(f"{path} was read"))


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
    no_reading(monkeypatch)
    monkeypatch.setattr(images_module, "inspect_images", lambda *_: pytest.fail("images were hashed"))
    trusting = open_run(run, TO_BUILD_BY_PLAN)
    assert trusting.images.key_of == hashed.images.key_of
    assert list(trusting.images.path_of) == list(hashed.images.path_of)
    assert trusting.identity() == hashed.identity()


def test_only_files_that_the_plan_lacks_are_hashed(run, site, tmp_path, monkeypatch):
    assert open_run(run, TO_BUILD_BY_PLAN).images == open_run(run, TO_BUILD).images
    open_run(run, TO_BUILD).write_plan()
    site.noise("images/new.png", 100)
    write_records(tmp_path, ["0.png", "new.png", "gone.png"])
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
def test_an_image_edited_after_planning_is_never_counted_as_done(run, frames, site, when, age):
    open_run(run, TO_BUILD).write_plan()
    if when == "after its shard was made":
        open_run(run, TO_BUILD_BY_PLAN).build(worker=(0, 2))
    site.noise("images/1.png", 1000)
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


def test_a_staged_copy_that_lacks_an_image_or_is_damaged_is_not_used(staged_run, site, tmp_path):
    inputs = open_run(staged_run, TO_BUILD)
    folder = inputs.build().folder
    stage(folder, tmp_path / "local")
    site.noise("images/new.png", 100)
    write_records(tmp_path, ["0.png", "new.png"])
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


# Inputs from the cache alone.


def test_neither_images_nor_the_tower_are_read_and_images_need_not_exist(run, frames, built_inputs, monkeypatch):
    shutil.rmtree(frames[0].parent)
    no_reading(monkeypatch)
    monkeypatch.setattr(ModelFolder, "tower_tensors", lambda self: pytest.fail("the tower was read"))
    inputs = open_run(run, FROM_CACHE)
    assert inputs.images.key_of == built_inputs.images.key_of
    assert inputs.identity() == built_inputs.identity()
    assert len(inputs.open_cache()) == NUM_IMAGES


def test_of_several_processes_one_looks_at_the_cache(run, frames, built_inputs, monkeypatch):
    answers = []
    first = open_run(run, FROM_CACHE, once=lambda function: answers.append(function()) or answers[-1])
    monkeypatch.setattr("lookonce.run.open.cached_images", lambda *_: pytest.fail("looked at the cache"))
    monkeypatch.setattr("lookonce.run.open.fingerprint_of", lambda *_: pytest.fail("looked at the model"))
    replies = iter(answers)
    other = open_run(run, FROM_CACHE, once=lambda function: next(replies))
    assert (other.fingerprint, other.images) == (first.fingerprint, first.images)


@pytest.mark.guarantee("An edited or unknown image is never trained on from the cache.")
def test_an_edited_image_is_hashed_and_its_features_are_missing(run, frames, built_inputs, site):
    site.noise("images/1.png", 99)
    with pytest.raises(FeaturesMissing, match=r"does not know 1 of 7 images, the first being .*1\.png \(.*jsonl:2\)"):
        open_run(run, FROM_CACHE)


def test_an_image_that_was_only_touched_keeps_its_key(run, frames, built_inputs):
    os.utime(frames[1], (time.time() - 30,) * 2)
    inputs = open_run(run, FROM_CACHE)
    assert inputs.images.key_of == built_inputs.images.key_of


@pytest.mark.guarantee("An edited or unknown image is never trained on from the cache.")
@pytest.mark.parametrize("exists", [True, False])
def test_an_image_that_the_plan_does_not_know_is_an_error(run, frames, built_inputs, tmp_path, site, exists):
    write_records(tmp_path, ["0.png", "1.png", "2.png", "new.png", "newer.png"])
    for number, name in enumerate(("new.png", "newer.png") if exists else ()):
        site.noise(f"images/{name}", 50 + number)
    with pytest.raises(FeaturesMissing) as caught:
        open_run(run, FROM_CACHE)
    expected = f"does not know 2 of 5 images, the first being {tmp_path}/images/new.png ({tmp_path}/records.jsonl:4)"
    gone = "" if exists else "there is no such file either; correct the records or `data.image_root`, then "
    assert f"{expected}; {gone}run: lookonce cache build RUN.yaml" in str(caught.value)


def test_after_a_move_images_are_hashed_until_a_build_records_the_files(run, frames, built_inputs, make_run, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    frames[0].parent.rename(moved / "images")
    again = make_run(data=run.data.model_dump() | {"image_root": str(moved)})
    found = open_run(again, FROM_CACHE)
    assert list(found.images.key_of.values()) == list(built_inputs.images.key_of.values())
    [note] = found.notes
    assert note.startswith("7 images hashed, because the cache's plan, which lists its images, lacks them or")
    assert open_run(again, TO_BUILD).build().num_encoded == 0
    shutil.rmtree(moved)
    inputs = open_run(again, FROM_CACHE)
    assert list(inputs.images.key_of.values()) == list(built_inputs.images.key_of.values())
    assert len(read_plan(inputs.cache_folder).shards) == 1


@pytest.mark.guarantee("An edited or unknown image is never trained on from the cache.")
def test_an_edit_that_keeps_size_and_modification_time_is_noticed(run, frames, built_inputs):
    path, before = frames[1], frames[1].stat()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(FeaturesMissing, match="does not know 1 of 7 images, the first being .*1.png"):
        open_run(run, FROM_CACHE)
