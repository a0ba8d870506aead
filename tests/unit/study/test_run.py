"""The jobs of a study, and the GPUs they run on."""

from __future__ import annotations

import pytest
import torch

from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction
from lookonce.files import write_json
from lookonce.study.file import expand, read_study
from lookonce.study.run import find_jobs, visible_gpus
from lookonce.study.state import StudyStatus

ROW = Prediction("val.jsonl:1", ("1.png",), "is there text", "yes", "yes", "yes")


@pytest.mark.parametrize(
    ("variable", "number", "found"),
    [(None, 0, []), (None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("", 0, []), ("GPU-a1", 1, ["GPU-a1"])],
)
def test_gpus_have_the_names_of_the_variable_if_it_is_set(monkeypatch, variable, number, found):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == found


def test_runs_with_the_same_images_share_a_build_and_wait_for_theirs_only(write_study):
    variants = {"a": None, "b": {"starts_from": "a"}, "small": {"cache.max_pixels": 65536}}
    jobs = {job.name: job for job in find_jobs(expand(read_study(write_study(variants, seeds=[1, 2]))), set())}
    assert {name for name in jobs if name.startswith("cache")} == {"cache of a-1", "cache of small-1"}
    assert jobs["a-2"].after == ("cache of a-1",) and jobs["small-1"].after == ("cache of small-1",)
    assert jobs["b-2"].after == ("cache of a-1", "a-2") and jobs["a-1"].cost == 32
    assert jobs["cache of a-1"].command[:2] == ("cache", "build") and not jobs["cache of a-1"].is_done()


def test_a_run_with_context_is_asked_with_reference_and_with_no_answers_after_its_result(write_study, look_complete):
    variants = {"plain": None, "staged": {"data.context": {"by": "stage", "order": [1, 2]}}}
    variants["inference-only"] = variants["staged"] | {"eval.staged": "none"}
    path = write_study(variants, seeds=[1])
    runs = expand(read_study(path))
    jobs = {job.name: job for job in find_jobs(runs, set())}
    assert {name for name in jobs if name.endswith("-contexts")} == {"staged-1-contexts", "inference-only-1-contexts"}
    one, own = jobs["staged-1-contexts"], runs["staged-1"]
    assert one.command == ("eval", "--reference-context", "--no-context", "--split", "val", str(own.run_file))
    assert one.after == ("staged-1",) and not one.is_done()
    assert "--no-context" not in jobs["inference-only-1-contexts"].command

    look_complete(own, [ROW])
    jobs = {job.name: job for job in find_jobs({own.name: own}, set())}
    assert list(jobs) == ["cache of staged-1", "staged-1-contexts"]
    assert jobs["staged-1-contexts"].after == ("cache of staged-1",)
    status = StudyStatus.read(path)
    assert "staged-1 is not evaluated with reference and no answers to earlier questions yet" in status.text()
    assert status.num_complete == 1
    assert status.to_json()["runs"][1]["not_asked"] == ["reference", "none"]

    for kind in ("reference", "none"):
        write_json(own.folder.metrics(f"val-{kind}"), Evaluation.of([ROW]).to_json())
    assert jobs["staged-1-contexts"].is_done() and find_jobs({own.name: own}, set()) == []
    assert "not evaluated" not in StudyStatus.read(path).text()
