"""Answers that are points: what is read as a point, points in boxes, distances."""

from __future__ import annotations

import pytest

from lookonce.eval.scores import match


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("(12, 30)", (12, 30)),
        ("[12,30]", (12, 30)),
        ("12, 30", (12, 30)),
        ("0.25, .5", (0.25, 0.5)),
        ("x=12 y=-3", (12, -3)),
        ('{"x": 12, "y": 30}', (12, 30)),
        ("<point>(12,30)</point>", (12, 30)),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", (1, 2, 3, 4)),
        ("[1, 2, 3, 4]", (1, 2, 3, 4)),
        ("bbox=[1, 2, 3, 4]", (1, 2, 3, 4)),
        ('[{"bbox_2d": [1, 2, 3, 4], "label": "2 polyps"}]', (1, 2, 3, 4)),
    ],
)
def test_two_or_four_numbers_are_a_point_or_a_box(text, numbers):
    assert match.reference_numbers(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        *("5-10mm", "11-20mm", "<5mm; >20mm", "1,200", "1; 2", "2 3", "2", "(1, 2, 3)", "10/20", "50%, 60%", "1:30"),
        *("2 polyps, 3 tubes", "", "none", "x, y", f"({'9' * 400}, 1)", "v1.2.3", "(nan, 1)"),
    ],
)
def test_other_answers_with_numbers_are_neither(text):
    assert match.reference_numbers(text) == ()


@pytest.mark.parametrize(
    ("given", "point"),
    [
        ("Click at (120, 34).", (120, 34)),
        ("[100, 10, 200, 30]", (150, 20)),
        ("pyautogui.click(x=5, y=6)", (5, 6)),
        ("there are 3 of 4 of 5", None),
        ("I cannot see it", None),
        (f"({'9' * 400}, 1)", None),
    ],
)
def test_an_answer_may_have_words_around_its_point(given, point):
    assert match.answer_point(given) == point


@pytest.mark.parametrize(
    ("given", "is_inside"),
    [("(10, 20)", True), ("(15, 25)", True), ("(30, 40)", True), ("(9.9, 25)", False), ("(0, 50, 40, 0)", True)],
)
def test_the_edge_of_a_box_is_inside(given, is_inside):
    assert match.is_inside(given, ["[10, 20, 30, 40]"]) is is_inside
    assert match.is_inside(given, ["[30, 40, 10, 20]"]) is is_inside


def test_any_of_several_boxes_counts():
    assert match.is_inside("(1, 1)", ["[8, 8, 9, 9]", "[0, 0, 2, 2]"])


def test_the_distance_is_to_the_nearest_reference():
    assert match.distance("(3, 4)", ["(0, 0)"]) == 5
    assert match.distance("(3, 4)", ["(0, 0)", "(3, 5)"]) == 1
    assert match.distance("nowhere", ["(0, 0)"]) is None


def test_references_of_both_kinds_are_neither():
    mixed = ["(1, 2)", "[1, 2, 3, 4]"]
    assert match.reference_boxes(mixed) == match.reference_points(mixed) == []
