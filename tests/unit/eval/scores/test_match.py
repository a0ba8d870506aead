"""How one answer matches the right ones: as a text, as labels, as words, as a point."""

from __future__ import annotations

import pytest

from lookonce.eval.scores import match

pytestmark = pytest.mark.guarantee("Metrics have the values of their published definitions, also on real answers.")


@pytest.mark.parametrize(
    ("given", "references", "strict", "lower"),
    [
        (" none\n", ["none"], True, True),
        ("None", ["none"], False, True),
        ("no", ["none"], False, False),
        ("paris is", ["paris ip", "paris is"], True, True),
        ("", [""], True, True),
    ],
)
def test_exact_match_allows_outer_spaces_and_lower_case_only_where_it_says_so(given, references, strict, lower):
    assert (match.exact(given, references), match.exact_lower(given, references)) == (strict, lower)


@pytest.mark.parametrize(
    ("given", "references", "f1", "precision", "recall"),
    [
        ("pink; red", ["red; pink"], 1, 1, 1),
        ("pink; red; white", ["red; pink"], 4 / 5, 2 / 3, 1),  # 2 of 3 given, 2 of 2 wanted: 2 * 2 / (3 + 2)
        ("pink", ["red; pink; white"], 1 / 2, 1, 1 / 3),  # 2 * 1 / (1 + 3)
        ("pink;;pink ; ", ["pink"], 1, 1, 1),
        ("Pink", ["pink"], 0, 0, 0),
        ("; ;", [""], 1, 1, 1),
        ("pink; red", ["white", "red; green"], 1 / 2, 1 / 2, 1 / 2),  # the reference of the highest F1 counts
    ],
)
def test_labels_are_compared_as_sets(given, references, f1, precision, recall):
    assert match.label_overlap(given, references) == pytest.approx((f1, precision, recall))
    assert match.same_labels(given, references) is (f1 == 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The polyp, a small one!", ["polyp", "small", "one"]),
        ("11-20mm", ["1120mm"]),
        ("An  apple\tand the pear", ["apple", "and", "pear"]),
        ("A", ["a"]),
        ("A.", ["a"]),
        ("(The)", ["the"]),
        ("?!", ["?!"]),
        (" ", []),
    ],
)
def test_words_are_those_of_squad(text, words):
    assert match.words(text) == words


@pytest.mark.parametrize(
    ("given", "references", "f1", "recall"),
    [
        ("a small red polyp", ["The red polyp is large."], 4 / 7, 2 / 4),  # red, polyp: of 3 given and 4 wanted
        ("yes", ["yes, there is text"], 2 / 5, 1 / 4),
        ("very very small", ["very small"], 4 / 5, 1),  # very is common once
        ("left", ["upper left", "left"], 1, 1),
        ("", ["A"], 0, 0),
        ("", [""], 1, 1),
        ("息肉", ["息肉"], 1, 1),
    ],
)
def test_common_words_are_counted_as_squad_and_llava_med_do(given, references, f1, recall):
    found = match.word_overlap(given, references)
    assert (found.f1, found.recall) == (pytest.approx(f1), pytest.approx(recall))


def test_closed_questions_have_the_reference_yes_or_no():
    closed = [match.is_closed(text) for text in ("yes", " No ", "none", "not relevant", "yes, one", "")]
    assert closed == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("given", "reference", "is_right"),
    [
        ("no", "none", True),
        ("The answer is none of these", "none", True),
        ("colonoscpy", "colonoscopy", True),  # 2 * 10 / 21
        ("gastroscopy", "colonoscopy", False),  # "oscopy": 2 * 6 / 22, and 2 * 7 / 22 with the "o" before
        ("", "none", False),
        ("none", "", False),
        ("ab" * 200, "ba" * 200, False),  # too long to compare
    ],
)
def test_the_lenient_match_is_that_of_earlier_publications(given, reference, is_right):
    assert match.lenient(given, [reference]) is is_right


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", "\x1b[31m\x00", "\ud800", "a" * 100_000, "; " * 999])
def test_hostile_answers_are_scored_like_others(hostile):
    for matched in (match.exact, match.exact_lower, match.same_labels, match.lenient):
        assert (matched(hostile, [hostile]), matched(hostile, ["polyp"])) == (True, False)
    assert match.word_overlap(hostile, [hostile]).f1 == 1 and match.label_overlap(hostile, ["polyp"]).f1 == 0


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("(12, 30)", (12, 30)),
        ("0.25, .5", (0.25, 0.5)),
        ("x=12 y=-3", (12, -3)),
        ('{"x": 12, "y": 30}', (12, 30)),
        ("<|box_start|>(1,2),(3,4)<|box_end|>", (1, 2, 3, 4)),
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


def test_the_distance_is_to_the_nearest_reference():
    assert match.distance("(3, 4)", ["(0, 0)"]) == 5
    assert match.distance("(3, 4)", ["(0, 0)", "(3, 5)"]) == 1
    assert match.distance("nowhere", ["(0, 0)"]) is None
