"""Figures: to which questions a metric applies, and the model's answers beside the majority answers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lookonce.eval.scores import match
from lookonce.eval.scores.metrics import Evaluation, Figure, figures, points_inside
from lookonce.eval.scores.prediction import GROUPINGS, Prediction, scores_by


@pytest.fixture(autouse=True)
def without_texts(monkeypatch):
    monkeypatch.setattr(match, "has_text_metrics", lambda: False)


def predictions(question: str, *answered: tuple[str, str, str]) -> list[Prediction]:
    """Predictions from triples of answer, model's answer and majority answer, about one image."""
    return [Prediction("here:1", ("a.jpg",), question, *one, image_keys=("a",)) for one in answered]


def found(answered: list[Prediction], sizes=None) -> dict[str, Figure]:
    return figures(answered, {name: scores_by(answered, name) for name in GROUPINGS}, sizes or {})


def scored(figure: Figure) -> tuple[int, float | None, float | None]:
    return figure.num_questions, figure.model, figure.majority


def test_closed_questions_have_a_balanced_accuracy_and_open_ones_a_recall():
    closed = predictions("text?", ("yes", "yes", "no"), *[("no", "no", "no")] * 2, ("no", "yes", "no"))
    values = found([*closed, *predictions("what?", ("a red polyp", "red", "tube"))])
    assert scored(values["closed_exact_match"]) == (4, 3 / 4, 3 / 4)
    assert scored(values["closed_balanced_accuracy"]) == (4, (1 + 2 / 3) / 2, (0 + 1) / 2)
    assert scored(values["open_exact_match"]) == (1, 0, 0)
    assert scored(values["open_token_recall"]) == (1, 1 / 2, 0)


def test_a_balanced_exact_match_weighs_the_answers_of_a_question_equally():
    many = predictions("text?", *[("yes", "yes", "yes")] * 8, ("no", "yes", "yes"), ("no", "no", "yes"))
    values = found([*many, *predictions("where?", ("left", "left", "?"))])
    assert scored(values["exact_match_balanced"]) == pytest.approx((11, (10 * 0.75 + 1) / 11, (10 * 0.5) / 11))


def test_labels_are_scored_in_all_answers_to_a_question_that_may_have_several():
    values = found([*predictions("colour?", ("pink; red", "red; pink", "pink"), ("pink", "pink; red", "pink"))])
    assert scored(values["label_set_match"]) == (2, 1 / 2, 1 / 2)
    assert scored(values["label_precision"]) == (2, (1 + 1 / 2) / 2, 1)
    assert scored(values["label_recall"]) == (2, 1, (1 / 2 + 1) / 2)
    assert scored(values["label_f1"]) == pytest.approx((2, (1 + 2 / 3) / 2, (2 / 3 + 1) / 2))


def test_a_metric_without_questions_is_left_out_and_a_distance_of_no_point_is_not_defined():
    assert found([]) == {}
    names = found(predictions("what?", ("polyp", "polyp", "tube")))
    assert not [name for name in names if name.startswith(("closed", "label", "point", "bleu"))]
    values = found(predictions("where?", ("(0, 0)", "nowhere", "none")))
    assert scored(values["point_distance"]) == (1, None, None)
    assert values["point_distance"].line() == ("distance of points, mean", "1", "", "", "")
    assert values["point_unread"].model == 1


def test_points_in_boxes_are_counted_and_answers_without_a_point_are_wrong():
    answered = predictions("where?", *[("[10, 10, 20, 20]", text, "(10, 20)") for text in ("(15, 15)", "(5, 5)", "?")])
    values = found(answered)
    assert scored(values["point_inside"]) == (3, 1 / 3, 1)
    assert scored(values["point_unread"]) == (3, 1 / 3, 0)
    assert "point_distance" not in values


def test_points_are_counted_by_platform_and_kind_of_element_and_their_mean_weighs_groups_equally():
    inside, outside = ("[10, 10, 20, 20]", "(15, 15)", "(0, 0)"), ("[10, 10, 20, 20]", "(9, 9)", "(12, 12)")
    web, mobile = ({"source": source, "category": "icon"} for source in ("web", "mobile"))
    answered = [
        *(replace(row, **web) for row in predictions("where?", inside, inside, inside, outside)),
        *(replace(row, **mobile) for row in predictions("where?", outside)),
        *predictions("where?", inside),
        *(replace(row, **mobile) for row in predictions("text?", ("yes", "yes", "no"))),
    ]
    figures = points_inside(answered)
    assert list(figures) == ["mobile, icon", "web, icon", "mean"]
    assert list(map(scored, figures.values())) == [(1, 0, 1), (4, 3 / 4, 1 / 4), (5, 3 / 8, 5 / 8)]
    evaluation = Evaluation.of(answered)
    assert evaluation.to_json()["points_inside"]["web, icon"]["model"] == 3 / 4
    assert re.search(r"points inside, web, icon +4 +75.0% +25.0%", evaluation.text({"untuned": {}}))
    assert points_inside(answered[:4]) == {} and "points_inside" not in Evaluation.of(answered[:4]).to_json()


def test_distances_are_in_pixels_and_in_diagonals_of_images_whose_size_is_known():
    answered = predictions("where?", ("(0, 0)", "(3, 4)", "(0, 10)"), ("(0, 0)", "(6, 8)", "(0, 20)"))
    three = [*answered, *predictions("where?", ("(0, 0)", "(30, 40)", "(0, 60)"))]
    assert scored(found(three)["point_distance_median"]) == (3, 10, 20)
    answered += predictions("where?", ("(0, 0)", "nowhere", "none"))
    assert scored(found(answered)["point_distance"]) == (3, 7.5, 15)
    assert scored(found(answered)["point_distance_median"]) == (3, 7.5, 15)
    assert "point_distance_diagonal" not in found(answered, {"a": None})
    assert scored(found(answered, {"a": (30, 40)})["point_distance_diagonal"]) == pytest.approx((3, 7.5 / 50, 15 / 50))
    assert "point_distance_diagonal" not in found(predictions("where?", *[("(500, 0)", "(3, 4)", "")]), {"a": (30, 40)})


def test_all_references_count_in_every_metric():
    one = Prediction("here:1", (), "q", "a; b", "c", "B; A", references=("a; b", "c"))
    values = found([one])
    names = ("exact_match_lower", "label_f1", "label_set_match", "token_f1", "lenient")
    assert [values[name].model for name in names] == [1] * len(names)
    assert values["token_f1"].majority == 1 and values["exact_match_lower"].majority == 0
