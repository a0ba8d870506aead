"""Scores, the majority baseline, and images shuffled to see whether the model looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookonce.datasets.records import Record, Turn
from lookonce.train.evaluate import Evaluation, Majority, Prediction, shuffle_images


def prediction(answer: str, predicted: str, majority: str = "no", question: str = "q") -> Prediction:
    return Prediction("here:1", "a.jpg", question, answer, predicted, majority)


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
def test_exact_match_is_strict_but_for_outer_spaces(answer, predicted, right):
    assert prediction(answer, predicted).is_right is right


def test_scores_are_shares_in_all_and_by_question():
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


def test_the_majority_is_the_most_frequent_training_answer_of_each_question():
    def record(question, answer):
        return Record((), (Turn(question, answer),))

    answers = [("a", "1"), ("a", "2"), ("a", "2"), ("b", "3"), ("b", "3"), ("b", "3"), ("b", "1")]
    majority = Majority([record(*pair) for pair in answers])
    assert majority.answer("a") == "2"
    assert majority.answer("b") == "3"
    assert majority.answer("never asked") == "3"


@pytest.mark.parametrize("num_images", [2, 3, 10])
def test_shuffled_images_are_all_others(num_images):
    records = [Record((Path(f"{n}.jpg"),), (Turn("q", str(n)),), origin=str(n)) for n in range(num_images)] * 2
    shuffled = shuffle_images(records)
    assert all(a.images != b.images for a, b in zip(records, shuffled, strict=True))
    assert {r.images for r in records} == {r.images for r in shuffled}
    assert [(r.turns, r.origin) for r in records] == [(r.turns, r.origin) for r in shuffled]


def test_the_report_has_a_line_a_question_and_one_for_all():
    lines = Evaluation.of([prediction("yes", "yes"), prediction("2", "1", "2", "how many")]).text().splitlines()
    assert len(lines) == 4
    assert lines[-1].split() == ["all", "2", "50.0%", "50.0%"]
