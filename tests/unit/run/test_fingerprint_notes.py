"""Recorded fingerprints are trusted exactly as long as nothing that they were computed from has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.fingerprint import NOTES, Fingerprint, code_files, hash_language_model
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, Needs, OpenRun, open_model, open_run, source_of

CLOCK = "lookonce.datasets.images.now"


def find_fingerprint(run: RunFile) -> Fingerprint:
    return open_run(run, Needs("tests", model="fingerprint")).fingerprint


def later() -> float:
    return time.time() + 60


@pytest.fixture
def run(make_run, sample, tmp_path, monkeypatch) -> RunFile:
    """A run with its own folder of caches and its own model, which was written a minute ago."""
    shutil.copytree(sample / "model", tmp_path / "model")
    monkeypatch.setattr(CLOCK, later)
    few = {"train": str(sample / "test.jsonl"), "val": [], "test": []}
    run = make_run(model={"path": str(tmp_path / "model")}, data=few)
    run.cache.dir.mkdir()
    return run


def computed(run: RunFile) -> Fingerprint:
    """The fingerprint, computed without notes."""
    options = run.cache
    processor = ImageProcessor(Path(run.model.path), options.backend, options.min_pixels, options.max_pixels)
    return Fingerprint.of(ModelFolder.open(run.model.path), processor, options.dtype)


def note(run: RunFile) -> Path:
    [path] = (run.cache.dir / NOTES).iterdir()
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
    return run


def normalised(run: RunFile) -> RunFile:
    """Other weights with the same size and mtime, as in files from some archives."""
    path = Path(run.model.path) / "model.safetensors"
    before = path.stat()
    weights(run)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return run


def just_written(run: RunFile) -> RunFile:
    os.utime(Path(run.model.path) / "config.json", (later(),) * 2)
    return run


def more(run: RunFile) -> RunFile:
    (Path(run.model.path) / "more.json").write_text("{}")
    return run


def fewer_pixels(run: RunFile) -> RunFile:
    return run.model_copy(update={"cache": run.cache.model_copy(update={"max_pixels": 65536})})


def broken(run: RunFile) -> RunFile:
    note(run).write_text("{")
    return run


def another_release(run: RunFile) -> RunFile:
    return edit(run, lambda value: value["source"]["libraries"].update(transformers="4.0.0"))


def other_code(run: RunFile) -> RunFile:
    return edit(run, lambda value: value["source"].update(code="0" * 64))


def a_digit(run: RunFile) -> RunFile:
    return edit(run, lambda value: value["found"].update(tower_sha256="0" * 64))


def without_a_field(run: RunFile) -> RunFile:
    def change(value: dict[str, Any]) -> None:
        del value["found"]["dtype"]
        value["sha256"] = sha256(json.dumps(value["found"]).encode()).hexdigest()

    return edit(run, change)


def edit(run: RunFile, change: Callable[[dict[str, Any]], None]) -> RunFile:
    value = json.loads(note(run).read_text())
    change(value)
    note(run).write_text(json.dumps(value))
    return run


CASES = {
    nothing: True,
    link: True,
    weights: False,
    normalised: False,
    just_written: False,
    more: False,
    fewer_pixels: False,
    broken: False,
    another_release: False,
    other_code: False,
    a_digit: False,
    without_a_field: False,
}


@pytest.mark.guarantee(
    "A recorded fingerprint or hash of a model counts only while nothing it was computed from has changed."
)
@pytest.mark.parametrize(("change", "is_known"), CASES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_fingerprint_is_known_while_nothing_has_changed(run, change: Callable[[RunFile], RunFile], is_known: bool):
    find_fingerprint(run)
    changed = change(run)
    assert (source_of(changed).read_note(run.cache.dir) is not None) is is_known
    assert find_fingerprint(changed) == computed(changed)


def another_hash(run: RunFile) -> RunFile:
    return edit(run, lambda value: value.update(found="0" * 32))


HASH_IS_KNOWN = [nothing, fewer_pixels]
HASH_IS_UNKNOWN = [normalised, broken, other_code, another_hash]
"""What a note of a fingerprint shares with that of a hash is tested above."""


@pytest.mark.guarantee(
    "A recorded fingerprint or hash of a model counts only while nothing it was computed from has changed."
)
@pytest.mark.parametrize("change", HASH_IS_KNOWN + HASH_IS_UNKNOWN, ids=lambda change: change.__name__)
def test_the_hash_of_a_model_is_known_while_its_files_have_not_changed(run, change, monkeypatch):
    source_of(run).language_model_hash(run.cache.dir)
    changed, calls = change(run), []

    def hash_again(folder: Path) -> str:
        calls.append(folder)
        return hash_language_model(folder)

    monkeypatch.setattr("lookonce.cache.store.fingerprint.hash_language_model", hash_again)
    found = source_of(changed).language_model_hash(run.cache.dir)
    assert found == hash_language_model(Path(changed.model.path)) and (not calls) is (change in HASH_IS_KNOWN)


@pytest.mark.parametrize("clock", [time.time, later], ids=["old mtime", "new mtime"])
def test_no_note_is_written_for_a_model_that_was_modified_just_now(run, monkeypatch, clock):
    for path in Path(run.model.path).iterdir():
        os.utime(path, (0, 0))
    if clock is later:
        just_written(run)
    monkeypatch.setattr(CLOCK, clock)
    find_fingerprint(run)
    assert list(run.cache.dir.iterdir()) == []


def test_a_model_that_changes_while_it_is_read_gets_no_valid_note(run):
    source = source_of(run)
    fingerprint = open_model(source)[-1]
    weights(run)
    source.write_note(run.cache.dir, fingerprint)
    assert source_of(run).read_note(run.cache.dir) is None


@pytest.mark.parametrize("make", [OpenRun.write_plan, OpenRun.build])
def test_read_only_commands_do_not_create_the_folder_of_caches_and_those_that_do_write_a_note(run, make):
    run.cache.dir.rmdir()
    find_fingerprint(run)
    opened = open_run(run, TO_BUILD)
    assert not run.cache.dir.exists()
    make(opened)
    assert source_of(run).read_note(run.cache.dir) == computed(run)


def test_the_checksum_of_the_code_covers_all_modules_that_compute_fingerprints(root):
    """These are the cache modules that fingerprint.py imports, directly or not."""
    found, pending = set(), [root / "cache" / "store" / "fingerprint.py"]
    while pending:
        path = pending.pop()
        found.add(path)
        names = re.findall(r"from lookonce\.(cache\.\S+) import", path.read_text())
        pending += {root / f"{name.replace('.', '/')}.py" for name in names} - found
    assert found <= {path.resolve() for path in code_files()}


@pytest.mark.parametrize("needs", [Needs("tests", model="fingerprint"), TO_BUILD], ids=["fingerprint", "all"])
def test_a_model_of_the_hub_is_located_once(run, monkeypatch, tmp_path, needs):
    """Between two requests its branch may move to another commit."""
    folders = iter([run.model.path])
    monkeypatch.setattr("lookonce.hub.snapshot_download", lambda *_, **__: next(folders))
    monkeypatch.setattr("lookonce.hub.verify", lambda *_: False)
    monkeypatch.chdir(tmp_path)
    of_hub = run.model_copy(update={"model": run.model.model_copy(update={"path": "owner/name"})})
    assert open_run(of_hub, needs).fingerprint == computed(run)
    assert find_fingerprint(run) == computed(run)
