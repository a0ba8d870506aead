"""Routing: each question has the answer that the run of its stage gives alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.errors import UsageError
from lookonce.eval.join import Run, route
from lookonce.eval.scores.prediction import Prediction


def answered(by: str, stages: list[str | None]) -> Run:
    """A run that answers each question with its own name."""
    rows = [
        Prediction(f"a.jsonl:{number}", ("a.jpg",), f"question {number}", "yes", by, "no", stage=stage)
        for number, stage in enumerate(stages)
    ]
    return Run(by, rows, by, 1)


@settings(max_examples=30)
@given(st.lists(st.sampled_from("123"), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_routed_predictions_are_those_of_each_run_alone(stages, chance):
    runs = {stage: answered(f"run {stage}", stages) for stage in "123"}
    in_order = runs["1"].predictions
    chance.shuffle(runs["3"].predictions)  # another order changes nothing
    routed = route(runs, "stage")
    assert [one.question for one in routed] == [one.question for one in in_order]
    for one in routed:
        alone = next(row for row in runs[one.stage or ""].predictions if row.question == one.question)
        assert one == alone and one.predicted == f"run {one.stage}"


def test_questions_without_a_run_are_counted_and_named():
    stages = ["1", "2", "4", None, None]
    message = (
        r"^3 of 5 questions have no run to be routed to: stage 4 \(1\), no stage \(2\); there are runs for stage 1, 2; "
        "name one for each stage$"
    )
    with pytest.raises(UsageError, match=message):
        route({"1": answered("a", stages), "2": answered("b", stages)}, "stage")


def test_runs_that_answered_other_questions_are_refused():
    with pytest.raises(UsageError, match="they answered different questions"):
        route({"1": answered("a", ["1"]), "2": answered("b", ["1", "2"])}, "stage")
