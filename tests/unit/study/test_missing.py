"""What is missing of a study, as jobs for a scheduler."""

from __future__ import annotations

import os
from pathlib import Path

from lookonce.eval.scores.prediction import Prediction
from lookonce.study.file import expand, read_study
from lookonce.study.run import find_missing, line_of

VARIANTS = {"short": {"train.steps": 1}, "a": None, "b": {"starts_from": "a"}}
ROWS = [Prediction("val.jsonl:1", ("1.png",), "is there text", "yes", "yes", "yes")]


def found(study) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {job.name: (job.command[0], job.after) for job in find_missing(study)}


def test_each_run_waits_for_its_cache_and_its_start_and_the_report_for_all(write_study, tmp_path):
    study = write_study(VARIANTS, seeds=[1])
    jobs = find_missing(study)
    assert [*map(line_of, jobs)] == [
        f"cache\tcache of short-1\t{tmp_path}/study/run-files/short-1.yaml\t-\tbuild",
        f"train\ta-1\t{tmp_path}/study/run-files/a-1.yaml\tcache of short-1\t--resume",
        f"train\tb-1\t{tmp_path}/study/run-files/b-1.yaml\tcache of short-1,a-1\t--resume",
        f"train\tshort-1\t{tmp_path}/study/run-files/short-1.yaml\tcache of short-1\t--resume",
        f"report\treport\t{study}\ta-1,b-1,short-1\t",
    ]
    assert all(Path(job.command[-1]).exists() for job in jobs)


def test_only_what_is_missing_is_a_job(write_study, look_complete, monkeypatch):
    study = write_study(VARIANTS, seeds=[1])
    runs = expand(read_study(study))
    for one in runs.values():
        look_complete(one, ROWS)
    answered = runs["b-1"].folder.metrics("val")
    lost = answered.rename(answered.with_suffix(".lost"))
    monkeypatch.setattr("lookonce.study.run._is_built", lambda one: True)
    assert found(study) == {"b-1": ("eval", ()), "report": ("report", ("b-1",))}
    lost.rename(answered)
    assert found(study) == {"report": ("report", ())}
    page = runs["a-1"].settings.output.parent / "report.html"
    page.touch()
    assert found(study) == {}
    os.utime(page, (0, 0))
    assert found(study) == {"report": ("report", ())}, "answers are newer than the page"


def test_a_study_without_a_comparison_has_no_report(write_study):
    assert "report" not in found(write_study({"a": None}, seeds=[1, 2]))
    assert "report" not in found(write_study(VARIANTS, {"data": {"val": []}}, seeds=[1]))
