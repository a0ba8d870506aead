"""Exact match by question, category, source and stage, and the mean over groups."""

from __future__ import annotations

from lookonce.eval.scores.prediction import Prediction, Score, macro, score, scores_by


def prediction(is_right: bool, question: str = "q", **labels: str) -> Prediction:
    return Prediction("here:1", (), question, "yes", "yes" if is_right else "no", "yes", **labels)


ANSWERED = [
    prediction(True, "a", category="finding", stage="2"),
    prediction(False, "a", category="finding", stage="1"),
    prediction(True, "b", category="quality"),
    prediction(True, "b"),
]


def test_each_group_has_its_own_score():
    assert scores_by(ANSWERED, "question") == {"a": Score(2, 1 / 2, 1), "b": Score(2, 1, 1)}
    assert list(scores_by(ANSWERED, "stage")) == ["1", "2"]


def test_records_without_a_label_are_in_no_group():
    assert scores_by(ANSWERED, "category") == {"finding": Score(2, 1 / 2, 1), "quality": Score(1, 1, 1)}
    assert scores_by(ANSWERED, "source") == {}


def test_the_mean_over_groups_gives_each_the_same_weight():
    assert macro([Score(9, 1.0, 0.5), Score(1, 0.0, 0.25)]) == Score(10, 0.5, 0.375)


def test_no_predictions_have_the_score_zero():
    assert score([]) == Score(0, 0, 0) and scores_by([], "question") == {}
