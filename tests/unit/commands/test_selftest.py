"""`lookonce selftest` prints a table or JSON, ends with 1 if anything differs, and notes results of GPUs only."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.selftest.report import Check, Report, Way, note_path


@pytest.fixture
def result(monkeypatch, tmp_path):
    """Runs the command with a difference on a device."""

    def run(difference: float, device: str, *words: str):
        combination = {"device": device, "torch": "2.11.0"}
        report = Report(combination, (Check("model", difference, 0.1, Way()),), 1)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr("lookonce.selftest.run.run_selftest", lambda notify: report)
        return CliRunner().invoke(main, ["selftest", *words]), note_path(combination).exists()

    return run


def test_a_difference_within_its_spread_ends_with_0(result):
    done, is_noted = result(0.05, "NVIDIA H200")
    assert done.exit_code == 0 and "5.0e-02  1.0e-01  ok" in done.stdout and is_noted


def test_a_mismatch_ends_with_1_and_names_the_settings(result):
    done, _ = result(0.5, "NVIDIA H200", "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["fastest"] == "--set batch.mode=separate"
    assert "Error" not in done.stderr


def test_results_without_a_gpu_are_not_noted(result):
    done, is_noted = result(0.05, "CPU")
    assert done.exit_code == 0 and not is_noted
