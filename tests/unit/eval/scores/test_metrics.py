"""Scores: strict exact match, several references, and shares by question."""

from __future__ import annotations

import pytest

from lookonce.datasets.records import Record, Turn
from lookonce.eval.scores.metrics import Evaluation, Prediction


def prediction(answer: str, predicted: str, majority: str = "no", question: str = "q") -> Prediction:
    return Prediction("here:1", ("a.jpg",), question, answer, predicted, majority)


@pytest.mark.parametrize(
    ("answer", "predicted", "right"),
    [
        ("none", "none", True),
        ("none", " none\n", True),
        ("none", "no", False),
        ("no", "none", False),
        ("yes", "Yes", False),
        ("11-20mm", "11-20mm.", False),
        ("yes", "", False),
    ],
)
def test_exact_match_is_strict_apart_from_outer_spaces(answer, predicted, right):
    assert prediction(answer, predicted).is_right is right


@pytest.mark.parametrize(
    ("predicted", "right"), [("paris ip", True), (" paris is ", True), ("paris", False), ("paris ip; paris is", False)]
)
def test_any_of_several_references_is_right_and_nothing_between_them(predicted, right):
    one = Prediction("here:1", "a.jpg", "q", "paris ip", predicted, predicted, ("paris ip", "paris is"))
    assert (one.is_right, one.is_majority_right) == (right, right)
    assert one.to_json()["references"] == ("paris ip", "paris is")
    assert "references" not in prediction("paris ip", predicted).to_json()


@pytest.mark.parametrize(
    ("metadata", "turns", "found"),
    [
        ({"references": ["a", "b"]}, [Turn("q", "a")], ("a", "b")),
        ({}, [Turn("q", "a")], ()),
        ({"references": ["b", "a"]}, [Turn("q", "a")], ()),
        ({"references": ["a", 1]}, [Turn("q", "a")], ()),
        ({"references": "a"}, [Turn("q", "a")], ()),
        ({"references": []}, [Turn("q", "a")], ()),
        ({"references": ["a", "b"]}, [Turn("q", "a"), Turn("r", "a")], ()),
    ],
)
def test_references_must_begin_with_the_records_only_answer(metadata, turns, found):
    assert Record((), tuple(turns), metadata=metadata).references == found


def test_scores_are_shares_overall_and_by_question():
    evaluation = Evaluation.of(
        [
            prediction("yes", "yes"),
            prediction("no", "yes"),
            prediction("2", "2", "1", "how many"),
            prediction("no", "no"),
        ]
    )
    assert evaluation.overall.num_questions == 4
    assert evaluation.overall.exact_match == 3 / 4
    assert evaluation.overall.majority == 2 / 4
    assert evaluation.by_question["q"].exact_match == 2 / 3
    assert evaluation.by_question["how many"].majority == 0
    assert evaluation.to_json()["by_question"]["q"]["num_questions"] == 3


def test_the_report_has_one_line_per_question_and_one_for_all():
    lines = Evaluation.of([prediction("yes", "yes"), prediction("2", "1", "2", "how many")]).text().splitlines()
    assert len(lines) == 4
    assert lines[-1].split() == ["all", "2", "50.0%", "50.0%"]
