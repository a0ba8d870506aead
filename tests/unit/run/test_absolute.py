"""What is recorded with a run is found from every working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookonce.errors import CacheError, ModelError, RecordsError, RunFolderError
from lookonce.run.config import RunFile, read_run_file, with_absolute_paths
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_BUILD, open_run, source_of
from lookonce.run.records import read_splits

IDENTITY = {"cache": "c1"}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The working directory, with a model folder in it."""
    home = tmp_path / "home"
    (home / "models" / "m").mkdir(parents=True)
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def run(home, monkeypatch) -> RunFile:
    monkeypatch.delenv("UNSET", raising=False)
    Path("run.yaml").write_text(
        "model: {path: models/m}\n"
        "data: {train: [a.jsonl, ../b.jsonl], val: c.jsonl, image_root: images}\n"
        "cache: {stage: $UNSET/caches}\n"
        "output: runs/a\n"
    )
    return read_run_file(Path("run.yaml"))


def test_all_paths_of_a_run_become_absolute(run, home):
    recorded = with_absolute_paths(run)
    assert recorded.model.path == str(home / "models" / "m")
    assert recorded.data.train == [home / "a.jsonl", home / "../b.jsonl"] and recorded.data.val == [home / "c.jsonl"]
    assert recorded.data.image_root == home / "images" and recorded.data.test == []
    assert recorded.cache.dir == home / "caches" and recorded.output == home / "runs" / "a"
    assert (recorded.lora, recorded.batch, recorded.train) == (run.lora, run.batch, run.train)
    named = run.model_copy(update={"model": run.model.model_copy(update={"path": "Qwen/Qwen3-VL-2B-Instruct"})})
    recorded = with_absolute_paths(named)
    assert recorded.model.path == "Qwen/Qwen3-VL-2B-Instruct" and recorded.cache.stage == Path("$UNSET/caches")


def test_a_run_is_the_same_run_from_another_working_directory(run, home, monkeypatch):
    folder = RunFolder(home / "runs" / "a")
    folder.claim(run, IDENTITY)
    folder.log.touch()
    monkeypatch.chdir("/")
    folder.check(run, IDENTITY)
    folder.check(read_run_file(home / "runs" / "a" / "run.yaml"), IDENTITY)


def test_what_is_not_found_is_named_in_full_with_what_it_is_relative_to(run, make_run, home, monkeypatch):
    relative = "is relative to the working directory"
    with pytest.raises(RecordsError, match=f"no records file at {home}/a.jsonl .a.jsonl {relative}"):
        read_splits(run)
    absent = run.model_copy(update={"model": run.model.model_copy(update={"path": "absent"})})
    with pytest.raises(ModelError, match=f"no model folder at {home}/absent .absent {relative}"):
        source_of(absent)
    with pytest.raises(RunFolderError, match=f"{home}/runs/a .runs/a {relative}. is not a run folder"):
        RunFolder(run.output).read_run()
    with pytest.raises(CacheError, match=f"no cache in {home}/caches .caches {relative}.; build it with"):
        open_run(make_run(cache={"dir": "caches"}), TO_BUILD).open_cache()
