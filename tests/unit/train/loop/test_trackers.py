"""Trackers: their packages, their runs, and errors of theirs. The real ones are in integration tests."""

from __future__ import annotations

import importlib.util
import json

import pytest

from lookonce.errors import UsageError
from lookonce.run.folder import RunFolder
from lookonce.train.loop import trackers as module
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.trackers import EXTRAS, Trackers, flat


@pytest.mark.parametrize("name", EXTRAS)
def test_an_absent_package_is_an_error_with_the_command(make_run, tmp_path, monkeypatch, name):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package == name else find(package))
    run = make_run(train={"track": [name]})
    expected = rf"train.track names {name}, which is not installed; .* pip install 'lookonce\[{EXTRAS[name]}\]'"
    with pytest.raises(UsageError, match=expected):
        training_arguments(run, tmp_path)


def test_each_extra_is_in_the_package(root):
    import tomllib

    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)


class Fake:
    """A tracker's run that notes what it gets."""

    where = "files in here"
    begun: list = []
    got: list = []
    fails = False

    def __init__(self, begun):
        if self.fails:
            raise RuntimeError("no API key\nmore")
        self.begun.append(begun)
        self.id = begun.id or "new"

    def callback(self):
        return self

    def log_scores(self, scores, step):
        self.got.append((scores, step))

    def close(self, error):
        self.got.append(error)


@pytest.fixture
def fake(monkeypatch):
    kind = type("OneFake", (Fake,), {"begun": [], "got": []})
    monkeypatch.setitem(module.OPEN, "wandb", kind)
    return kind


def test_scores_are_logged_and_the_run_is_closed_at_the_end(fake, tmp_path):
    notes: list[str] = []
    with Trackers(["wandb"], RunFolder(tmp_path), notes.append) as trackers:
        trackers.open({"seed": 1}, 0, is_new=True)
        assert isinstance(trackers.callbacks()[0], Fake)
        trackers.log_scores({"exact_match": 0.5, "majority": None}, 12)
    assert notes == ["files in here"] and fake.got == [({"final/exact_match": 0.5}, 12), None]
    assert fake.begun[0].settings == {"seed": 1}


def test_a_resumed_training_continues_its_run_and_a_new_one_does_not(fake, tmp_path):
    for is_new in (True, False, True):
        with Trackers(["wandb"], RunFolder(tmp_path), lambda note: None) as trackers:
            trackers.open({}, 4, is_new=is_new)
    assert [begun.id for begun in fake.begun] == ["", "new", ""]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "new"}


@pytest.mark.parametrize("text", ["{", "[]", '{"wandb": 3}'])
def test_a_broken_record_of_runs_is_named_and_another_run_begins(fake, tmp_path, text):
    (tmp_path / "trackers.json").write_text(text)
    notes: list[str] = []
    with Trackers(["wandb"], RunFolder(tmp_path), notes.append) as trackers:
        trackers.open({}, 4, is_new=False)
    assert fake.begun[0].id == "" and notes[0].startswith(f"{tmp_path / 'trackers.json'} is broken (")


def test_a_run_learns_how_the_training_ended(fake, tmp_path):
    error = RuntimeError("no memory")
    with pytest.raises(RuntimeError), Trackers(["wandb"], RunFolder(tmp_path), lambda note: None) as trackers:
        trackers.open({}, 0, is_new=True)
        raise error
    assert fake.got == [error]


def test_a_tracker_that_cannot_start_is_an_error_that_names_it(fake, tmp_path):
    fake.fails = True
    with (
        pytest.raises(UsageError, match="train.track: wandb cannot start: no API key; set WANDB_MODE=.* remove wandb"),
        Trackers(["wandb"], RunFolder(tmp_path), lambda note: None) as trackers,
    ):
        trackers.open({}, 0, is_new=True)


def test_a_tracker_that_fails_at_the_end_is_only_a_note(fake, tmp_path, monkeypatch):
    def fail(*arguments):
        raise ConnectionError("no route to host")

    notes: list[str] = []
    monkeypatch.setattr(fake, "log_scores", fail)
    monkeypatch.setattr(fake, "close", fail)
    with Trackers(["wandb"], RunFolder(tmp_path), notes.append) as trackers:
        trackers.open({}, 0, is_new=True)
        trackers.log_scores({"exact_match": 0.5}, 12)
    assert notes[1:] == ["wandb could not log everything: no route to host; the run folder has all of it"] * 2


def test_without_trackers_nothing_is_written(tmp_path):
    with Trackers([], RunFolder(tmp_path), pytest.fail) as trackers:
        trackers.open({}, 0, is_new=True)
        assert trackers.callbacks() == []
    assert list(tmp_path.iterdir()) == []


def test_nested_settings_get_dotted_names():
    assert flat({"train": {"seed": 1, "track": ["wandb"]}, "output": "a"}) == {
        "train.seed": 1,
        "train.track": ["wandb"],
        "output": "a",
    }
