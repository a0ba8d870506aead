"""`lookonce selftest` prints a table or JSON, and ends with 1 if anything differs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.selftest.report import Check, Report, Variant


@pytest.fixture
def result(monkeypatch):
    """Runs the command with a difference on a device."""

    def run(difference: float, *words: str):
        report = Report({"device": "NVIDIA H200", "torch": "2.11.0"}, (Check("model", difference, 0.1, Variant()),), 1)
        monkeypatch.setattr("lookonce.selftest.run.run_selftest", lambda notify: report)
        return CliRunner().invoke(main, ["selftest", *words])

    return run


def test_a_difference_within_its_spread_ends_with_0(result):
    done = result(0.05)
    assert done.exit_code == 0 and "5.0e-02  1.0e-01  ok" in done.stdout


def test_a_mismatch_ends_with_1_and_names_the_settings(result):
    done = result(0.5, "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["fastest"] == "--set batch.mode=separate"
    assert "Error" not in done.stderr
