"""Fingerprints that were found before: trusted while nothing that they are found from has changed, and no longer."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lookonce.cache.model.checkpoint import Checkpoint
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.known import KNOWN, Source
from lookonce.train.base_model import find_fingerprint, open_model, source_of
from lookonce.train.inputs import Inputs
from lookonce.train.run_file import RunFile


@pytest.fixture
def run(make_run, sample, tmp_path) -> RunFile:
    """With a model of its own, which was written long ago."""
    shutil.copytree(sample / "model", tmp_path / "model")
    for path in (tmp_path / "model").iterdir():
        grow_old(path)
    return make_run(model={"path": str(tmp_path / "model")})


def grow_old(path: Path) -> None:
    os.utime(path, (path.stat().st_mtime - 60,) * 2)


def computed(run: RunFile) -> Fingerprint:
    """What the fingerprint is, whatever is noted."""
    options = run.cache
    processor = ImageProcessor(Path(run.model.path), options.backend, options.min_pixels, options.max_pixels)
    return Fingerprint.of(Checkpoint.open(run.model.path), processor, options.dtype)


def note(run: RunFile) -> Path:
    [path] = (run.cache.dir / KNOWN).iterdir()
    return path


def nothing(run: RunFile) -> RunFile:
    return run


def link(run: RunFile) -> RunFile:
    """The same model by another path."""
    other = Path(run.model.path).with_name("link")
    other.symlink_to(run.model.path)
    return run.model_copy(update={"model": run.model.model_copy(update={"path": str(other)})})


def weights(run: RunFile) -> RunFile:
    path = Path(run.model.path) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, (time.time() - 30,) * 2)
    return run


def just_written(run: RunFile) -> RunFile:
    (Path(run.model.path) / "config.json").touch()
    return run


def more(run: RunFile) -> RunFile:
    (Path(run.model.path) / "more.json").write_text("{}")
    grow_old(Path(run.model.path) / "more.json")
    return run


def fewer_pixels(run: RunFile) -> RunFile:
    return run.model_copy(update={"cache": run.cache.model_copy(update={"max_pixels": 65536})})


def another_dtype(run: RunFile) -> RunFile:
    return run.model_copy(update={"cache": run.cache.model_copy(update={"dtype": "bfloat16"})})


def broken(run: RunFile) -> RunFile:
    note(run).write_text("{")
    return run


def another_release(run: RunFile) -> RunFile:
    value = json.loads(note(run).read_text())
    value["source"]["libraries"]["transformers"] = "4.0.0"
    note(run).write_text(json.dumps(value))
    return run


CASES = {
    nothing: True,
    link: True,
    weights: False,
    just_written: False,
    more: False,
    fewer_pixels: False,
    another_dtype: False,
    broken: False,
    another_release: False,
}


@pytest.mark.parametrize(("change", "is_known"), CASES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_fingerprint_is_known_while_nothing_has_changed(run, change: Callable[[RunFile], RunFile], is_known: bool):
    find_fingerprint(run)
    changed = change(run)
    assert (source_of(changed).recall(run.cache.dir) is not None) is is_known
    assert find_fingerprint(changed) == computed(changed)


def test_a_model_that_was_written_just_now_is_not_noted(run):
    just_written(run)
    find_fingerprint(run)
    assert not (run.cache.dir / KNOWN).exists()


def test_what_changes_while_it_is_read_is_not_taken_for_what_was_read(run):
    source = source_of(run)
    fingerprint = open_model(source)[-1]
    weights(run)
    source.remember(run.cache.dir, fingerprint)
    assert source_of(run).recall(run.cache.dir) is None


def test_where_nothing_can_be_noted_it_is_found_each_time(run):
    run.cache.dir.write_text("a file where the folder would be")
    assert find_fingerprint(run) == find_fingerprint(run) == computed(run)


def test_the_note_of_a_source_is_found_by_model_and_settings_alone(tmp_path):
    """So that a new release writes over what the old one had noted."""
    (tmp_path / "config.json").write_text("{}")
    grow_old(tmp_path / "config.json")
    old, new = (Source(tmp_path, {}, {"config.json": [2, number]}, {}) for number in (1, 2))
    assert old._path(tmp_path) == new._path(tmp_path) != Source(Path("other"), {}, {}, {})._path(tmp_path)


@pytest.mark.parametrize("open_run", [find_fingerprint, Inputs.open])
def test_a_model_of_the_hub_is_located_once(run, monkeypatch, tmp_path, open_run):
    """Its branch may have moved to another commit when it is asked for again."""
    folders = iter([run.model.path])
    monkeypatch.setattr("lookonce.cache.model.hub.snapshot_download", lambda *_, **__: next(folders))
    monkeypatch.chdir(tmp_path)
    of_hub = run.model_copy(update={"model": run.model.model_copy(update={"path": "owner/name"})})
    opened = open_run(of_hub)
    assert (opened.fingerprint if isinstance(opened, Inputs) else opened) == computed(run)
    assert find_fingerprint(run) == computed(run)
