"""Inputs from the cache alone: neither images nor the tower are read, and nothing else differs."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.store.metadata import read_plan
from lookonce.datasets import images as images_module
from lookonce.errors import FeaturesMissing
from lookonce.run.open import FROM_CACHE, TO_BUILD, OpenRun, open_run

pytestmark = pytest.mark.usefixtures("one_tower", "no_fsync")

NAMES = ("a.png", "b.png", "c.png")


def write_records(path: Path, names: tuple[str, ...]) -> None:
    lines = [{"image_filename": f"images/{name}", "question": "Is it?", "answer": "yes"} for name in names]
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.fixture
def frames(site, tmp_path, files_are_old) -> Path:
    """A folder of images, and `records.jsonl` about them."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        site.noise(f"images/{name}", number)
    write_records(tmp_path / "records.jsonl", NAMES)
    return folder


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


def test_neither_images_nor_the_tower_are_read_and_images_need_not_exist(run, frames, built_inputs, monkeypatch):
    shutil.rmtree(frames)
    no_reading(monkeypatch)
    monkeypatch.setattr(ModelFolder, "tower_tensors", lambda self: pytest.fail("the tower was read"))
    inputs = open_run(run, FROM_CACHE)
    assert inputs.images.key_of == built_inputs.images.key_of
    assert inputs.identity() == built_inputs.identity()
    assert len(inputs.open_cache()) == len(NAMES)


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
    site.noise("images/b.png", 99)
    with pytest.raises(FeaturesMissing, match=r"does not know 1 of 3 images, the first being .*b\.png \(.*jsonl:2\)"):
        open_run(run, FROM_CACHE)


def test_an_image_that_was_only_touched_keeps_its_key(run, frames, built_inputs):
    os.utime(frames / "b.png", (time.time() - 30,) * 2)
    inputs = open_run(run, FROM_CACHE)
    assert inputs.images.key_of == built_inputs.images.key_of


@pytest.mark.guarantee("An edited or unknown image is never trained on from the cache.")
@pytest.mark.parametrize("exists", [True, False])
def test_an_image_that_the_plan_does_not_know_is_an_error(run, frames, built_inputs, tmp_path, site, exists):
    write_records(tmp_path / "records.jsonl", (*NAMES, "new.png", "newer.png"))
    for number, name in enumerate(("new.png", "newer.png") if exists else ()):
        site.noise(f"images/{name}", 50 + number)
    with pytest.raises(FeaturesMissing) as caught:
        open_run(run, FROM_CACHE)
    expected = f"does not know 2 of 5 images, the first being {frames / 'new.png'} ({tmp_path / 'records.jsonl'}:4)"
    gone = "" if exists else "there is no such file either; correct the records or `data.image_root`, then "
    assert f"{expected}; {gone}run: lookonce cache build RUN.yaml" in str(caught.value)


def test_after_a_move_images_are_hashed_until_a_build_records_the_files(run, frames, built_inputs, make_run, tmp_path):
    moved = tmp_path / "moved"
    frames.parent.joinpath("moved").mkdir()
    frames.rename(moved / "images")
    again = make_run(data=run.data.model_dump() | {"image_root": str(moved)})
    found = open_run(again, FROM_CACHE)
    assert list(found.images.key_of.values()) == list(built_inputs.images.key_of.values())
    [note] = found.notes
    assert note.startswith("3 images hashed, because the cache's plan, which lists its images, lacks them or")
    assert open_run(again, TO_BUILD).build().num_encoded == 0
    shutil.rmtree(moved)
    inputs = open_run(again, FROM_CACHE)
    assert list(inputs.images.key_of.values()) == list(built_inputs.images.key_of.values())
    assert len(read_plan(inputs.cache_folder).shards) == 1


@pytest.mark.guarantee("An edited or unknown image is never trained on from the cache.")
def test_an_edit_that_keeps_size_and_modification_time_is_noticed(run, frames, built_inputs):
    path, before = frames / "a.png", (frames / "a.png").stat()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(FeaturesMissing, match="does not know 1 of 3 images, the first being .*a.png"):
        open_run(run, FROM_CACHE)
