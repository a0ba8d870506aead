"""Uses: a run that has opened a cache is known there for as long as its folder has something in it."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from lookonce.cache.store.uses import note_use, use_path, uses


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    return folder


def test_a_use_is_noted_once_and_with_its_absolute_folder(tmp_path, run, monkeypatch):
    cache = tmp_path / "cache"
    note_use(cache, run)
    monkeypatch.chdir(run.parent)
    note_use(cache, run.relative_to(run.parent))
    [use] = uses(cache)
    assert (use.run, use.host) == (str(run), os.uname().nodename) and use.time > 1.7e9
    assert [path.name for path in (cache / "uses").iterdir()] == [use_path(cache, run).name]


def test_a_use_ends_when_the_run_folder_goes_or_is_empty(tmp_path, run):
    other = run.with_name("b")
    shutil.copytree(run, other)
    for folder in (run, other):
        note_use(tmp_path / "cache", folder)
    assert [use.run for use in uses(tmp_path / "cache")] == [str(run), str(other)]
    shutil.rmtree(run)
    (other / "run.json").unlink()
    assert uses(tmp_path / "cache") == []


def test_a_cache_nobody_has_used_has_no_uses(tmp_path):
    assert uses(tmp_path) == [] and uses(tmp_path / "nothing") == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run": 3, "host": "", "time": 0}', "\x00"])
def test_a_broken_note_is_no_use(tmp_path, content):
    (tmp_path / "uses").mkdir()
    (tmp_path / "uses" / "0123456789abcdef.json").write_text(content)
    assert uses(tmp_path) == []


def test_a_folder_that_can_not_be_written_to_is_tolerated(tmp_path, run):
    (tmp_path / "file").write_text("")
    note_use(tmp_path / "file", run)  # as on a read-only disk, also for root
    assert uses(tmp_path / "file") == []


def test_a_note_says_what_the_format_says(tmp_path, run):
    note_use(tmp_path, run)
    assert json.loads(use_path(tmp_path, run).read_text()).keys() == {"run", "host", "time"}
    assert len(use_path(tmp_path, run).stem) == 16
