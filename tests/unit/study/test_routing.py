"""Variants that are routed: checked before anything is trained."""

from __future__ import annotations

import pytest

from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import UsageError
from lookonce.study.file import expand, read_study
from lookonce.study.state import RoutedRun, routed_runs

VARIANTS = {"one": None, "two": None, "both": {"route": {"variants": {1: "one", 2: "two"}}}}


@pytest.fixture
def routed(write_study, tmp_path):
    """The routed run of a study whose validation questions have these stages."""

    def make(stages: list[int | None]) -> RoutedRun:
        metadata = [{} if stage is None else {"stage": stage} for stage in stages]
        records = [Record(images=(), turns=(Turn("q", "yes"),), metadata=one) for one in metadata]
        write_records(tmp_path / "val.jsonl", records)
        study = read_study(write_study(VARIANTS, {"data": {"val": str(tmp_path / "val.jsonl")}}, seeds=[1, 2]))
        return routed_runs(study, expand(study))["both-2"]

    return make


def test_every_question_must_have_an_adapter(routed):
    routed([1, 2, 2]).check()
    with pytest.raises(
        UsageError, match=r"variant both: 2 of 3 questions have .*: stage 3 \(1\), no stage \(1\); there are"
    ):
        routed([1, 3, None]).check()


def test_it_has_the_runs_of_its_seed(routed, tmp_path):
    one = routed([1, 2])
    assert {value: run.name for value, run in one.runs.items()} == {"1": "one-2", "2": "two-2"}
    assert one.predictions == tmp_path / "study" / "both-2" / "predictions" / "val.jsonl"
