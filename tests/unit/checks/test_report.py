"""The table of a check."""

from __future__ import annotations

import json
from pathlib import Path

from lookonce.checks.report import CheckReport, Result

RESULTS = [
    Result("ok", "records", "train: 439 records"),
    Result("warning", "cache", "none", "lookonce cache build run.yaml"),
    Result("error", "images", "cannot read " + "/a/very/long/path" * 12, "repair it " * 12),
]


def report() -> CheckReport:
    return CheckReport(Path("run.yaml"), 439, True, 1.25, RESULTS)


def test_a_result_is_a_line_and_what_to_do_another():
    lines = report().text().splitlines()
    assert len(lines) == 7 and lines[0] == "ok       records      train: 439 records"
    assert lines[2] == " " * 22 + "-> lookonce cache build run.yaml"


def test_the_last_line_counts():
    assert report().text().endswith("\n\n1 error, 1 warning; 439 records; 1.2 s")


def test_the_same_as_json():
    value = json.loads(json.dumps(report().to_json(), default=str))
    assert value["num_errors"] == 1 and value["results"][1]["do"] == "lookonce cache build run.yaml"
