"""`lookonce study` without a training."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner, Result

from lookonce.cli import main


@pytest.fixture
def study_file(run_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {
        "base": run_file.name,
        "output": "study",
        "seeds": [1],
        "variants": {"a": None, "b": {"starts_from": "a"}},
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    return "study.yaml"


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, ["study", *words], catch_exceptions=False)


def test_a_study_that_has_not_begun_has_a_table_of_its_runs(study_file):
    result = invoke("status", study_file)
    assert result.exit_code == 0 and "0 of 2 runs complete" in result.output
    found = json.loads(invoke("status", study_file, "--json").output)["runs"]
    assert [(one["run"], one["starts_from"], one["training"]["state"]) for one in found] == [
        ("a-1", None, "not begun"),
        ("b-1", "a-1", "not begun"),
    ]


def test_jobs_are_lines_for_a_shell(study_file):
    lines = [line.split("\t") for line in invoke("jobs", study_file).output.splitlines()]
    assert [(kind, name, after) for kind, name, _, after, _ in lines] == [
        ("cache", "cache of a-1", "-"),
        ("train", "a-1", "cache of a-1"),
        ("train", "b-1", "cache of a-1,a-1"),
        ("report", "report", "a-1,b-1"),
    ]
    assert json.loads(invoke("jobs", study_file, "--json").output)[-1]["file"] == study_file


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("status", "no.yaml"), 2, "cannot read study file no.yaml: no such file or directory; see docs/studies.md"),
        (("report", "study.yaml"), 2, "not complete: a-1, b-1; run: lookonce study run study.yaml"),
        (("report", "study.yaml", "-o", "study.yaml"), 2, "study.yaml exists and is not a page of lookonce report"),
    ],
)
def test_mistakes_are_explained(study_file, words, code, said):
    result = invoke(*words)
    assert result.exit_code == code and said in result.output
