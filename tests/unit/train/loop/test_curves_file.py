"""`curves.svg`: drawn at each save and at the end."""

from __future__ import annotations

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from lookonce.run.folder import RunFolder
from lookonce.run.log_file import Curves
from lookonce.train.loop.log_files import CurvesFile, curves_svg

STATE = SimpleNamespace(is_world_process_zero=True)


@pytest.fixture
def folder(tmp_path):
    lines = [{"step": step, "loss": 3.0 - step, "learning_rate": 1e-4} for step in (1, 2)] + [
        {"step": 2, "eval_loss": 1.25}
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFolder(tmp_path)


@pytest.mark.parametrize("event", ["on_save", "on_train_end"])
def test_the_curves_are_drawn_at_each_save_and_at_the_end(folder, event):
    getattr(CurvesFile(folder), event)(None, STATE, None)
    text = folder.curves.read_text()
    ElementTree.fromstring(text)
    assert "lowest: 1.2500 at step 2" in text and "validation loss" in text


def test_only_the_first_rank_draws(folder):
    CurvesFile(folder).on_save(None, SimpleNamespace(is_world_process_zero=False), None)
    assert not folder.curves.exists()


def test_a_full_disk_does_not_stop_a_training(folder, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lookonce.train.loop.log_files.write_text", fail)
    CurvesFile(folder).on_save(None, STATE, None)


def test_exact_match_has_a_panel_if_it_was_measured():
    text = curves_svg(Curves({1: 2.0, 2: 1.0}, exact_match={1: 0.25, 2: 0.5}), "a")
    assert "exact match" in text and "highest: 50.0% at step 2" in text
    assert "exact match" not in curves_svg(Curves({1: 2.0}), "a")


def test_a_training_without_validation_or_without_a_line_is_drawn():
    assert "validation" not in curves_svg(Curves({1: 2.0}), "a")
    ElementTree.fromstring(curves_svg(Curves(), "a"))
