"""Notes: one file a combination, read only for the same one; broken and unwritable ones are no error."""

from __future__ import annotations

import os
import subprocess

import pytest

import lookonce.selftest.report as note
from lookonce.selftest.report import Check, Report, Way, combination, is_noted_exact, note_path, noted_exact, save_note

RUN = subprocess.run
HERE = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0"}
REPORT = Report(HERE, (Check("a", 1, 0, Way()), Check("b", 0, 0, Way(recorded=False))), 50)


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_noted_result_counts_for_its_ways_and_its_combination(cache_home):
    assert not is_noted_exact(HERE, Way(recorded=False))
    save_note(REPORT)
    assert is_noted_exact(HERE, Way(recorded=False)) and not is_noted_exact(HERE, Way())
    assert not is_noted_exact(HERE | {"driver": "590.0"}, Way(recorded=False))
    assert len(list((cache_home / "lookonce" / "selftest").glob("*.json"))) == 1


def test_a_later_result_replaces_those_of_the_ways_that_it_compared():
    save_note(REPORT)
    save_note(Report(HERE, (Check("a", 0, 0, Way()),), 50))
    assert is_noted_exact(HERE, Way(recorded=False)) and is_noted_exact(HERE, Way())
    save_note(REPORT)
    assert not is_noted_exact(HERE, Way())


def test_without_the_variable_notes_are_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert note_path(HERE).is_relative_to(tmp_path / ".cache" / "lookonce" / "selftest")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"combination": {}}', "null"])
def test_a_broken_note_counts_as_none(text):
    save_note(REPORT)
    note_path(HERE).write_text(text)
    assert noted_exact(HERE) == []


def test_a_folder_that_cannot_be_written_to_is_no_error_but_a_note(cache_home):
    cache_home.write_text("a file where the folder should be")
    notes: list[str] = []
    save_note(REPORT, notes.append)
    assert noted_exact(HERE) == []
    [note] = notes
    assert note.startswith("the self-test's result cannot be kept (") and str(cache_home) in note
    assert note.endswith("runs again before the next training; name a folder that you can write to in XDG_CACHE_HOME")


def test_the_combination_names_what_decides_which_kernels_run():
    found = combination("bf16")
    assert list(found) == ["device", "driver", "torch", "cuda", "triton", "transformers", "lookonce", "precision"]
    assert all(isinstance(value, str) and value for value in found.values())


def test_the_driver_is_what_its_module_or_nvidia_smi_says_or_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(note, "MODULE", tmp_path / "version")
    done = subprocess.CompletedProcess((), 0, "580.159.04\n580.159.04\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)
    assert note._driver() == "580.159.04"
    monkeypatch.setattr(note, "NVIDIA_SMI", (os.devnull,))
    monkeypatch.setattr(subprocess, "run", RUN)
    assert note._driver() is None
    note.MODULE.write_text("590.1\n")
    assert note._driver() == "590.1"
