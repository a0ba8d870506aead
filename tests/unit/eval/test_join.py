"""Runs are read, joined by question, and routed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.datasets.records import Turn
from lookonce.errors import UsageError
from lookonce.eval.join import Run, join, route
from lookonce.eval.scores.prediction import Prediction


def asked(number: int, question: str = "q", answer: str = "yes", predicted: str = "yes", **values) -> Prediction:
    keys = values.pop("image_keys", (f"key {number}",))
    images = (f"{number}.jpg",)
    return Prediction(f"a.jsonl:{number}", images, question, answer, predicted, "yes", image_keys=keys, **values)


def run(name: str, *predictions: Prediction) -> Run:
    return Run(name, list(predictions), "", None)


def test_answers_are_joined_by_image_question_and_turn_in_any_order_and_place():
    one, other, later = asked(1), asked(2, predicted="no"), asked(1, turn=1, predicted="no")
    moved = [replace(some, origin="elsewhere:9", images=("moved.jpg",)) for some in (later, other, one)]
    joined = join([run("a", one, other, later), run("b", *moved)])
    assert joined.right_QR.tolist() == [[1, 1], [0, 0], [0, 0]]
    assert joined.clusters.tolist() == [0, 1, 0]
    texts = [Prediction("a:1", (), "q", "x", "x", "x"), Prediction("a:1", (), "r", "x", "x", "x", turn=1)]
    texts.append(Prediction("a:2", (), "q2", "x", "x", "x"))
    assert join([run("a", *texts), run("b", *texts)]).clusters.tolist() == [0, 0, 1], "without an image by record"


TWICE = [asked(1), replace(asked(1, predicted="no"), origin="a.jsonl:5")]
AFTER = [replace(one, turn=1, earlier=(Turn(before, "x"),)) for one, before in zip(TWICE, "pq", strict=True)]
REFERENCES = [replace(one, answer=answer) for one, answer in zip(TWICE, ("yes", "two"), strict=True)]


SYSTEM = [replace(one, system=text) for one, text in zip(TWICE, ("Be brief.", None), strict=True)]


@pytest.mark.parametrize("rows", [TWICE, AFTER, REFERENCES, SYSTEM])
def test_a_question_that_is_asked_twice_about_an_image_is_joined_with_itself_in_any_order(rows):
    """By origin, by the questions before it whatever was answered, by references, and by the system text."""
    places = {} if rows is TWICE else {"origin": "b.jsonl:9"}
    moved = [replace(one, earlier=tuple(Turn(turn.question, "own") for turn in one.earlier), **places) for one in rows]
    assert join([run("a", *rows), run("b", *moved[::-1])]).right_QR.tolist() == [[1, 1], [0, 0]]


def test_lines_that_a_question_was_read_from_are_in_the_order_of_their_numbers():
    rows = [replace(asked(1), origin="a.jsonl:8"), replace(asked(1, predicted="no"), origin="a.jsonl:9")]
    moved = [replace(one, origin=f"a.jsonl:{number}") for one, number in zip(rows, (9, 10), strict=True)]
    assert join([run("a", *rows), run("b", *moved)]).right_QR.tolist() == [[1, 1], [0, 0]]


def test_a_question_asked_twice_is_joined_by_its_line_where_one_run_has_a_system_text_for_all():
    rows = [replace(one, system=text) for one, text in zip(TWICE, (None, "Be brief."), strict=True)]
    doctor = [replace(one, system=one.system or "You are a doctor.") for one in rows]
    assert join([run("a", *rows), run("b", *doctor)]).right_QR.tolist() == [[1, 1], [0, 0]]


def test_images_without_keys_that_were_moved_are_joined_by_their_lines():
    rows = [replace(asked(number, predicted="no" if number else "yes"), image_keys=()) for number in range(3)]
    moved = [replace(one, images=(f"elsewhere/{number}.jpg",)) for number, one in enumerate(rows)]
    assert join([run("a", *rows), run("b", *moved)]).right_QR.tolist() == [[1, 1], [0, 0], [0, 0]]


def test_answers_of_other_programs_are_joined_by_the_paths_of_images():
    rows = [replace(asked(number, predicted="no" if number else "yes"), image_keys=()) for number in range(3)]
    moved = [replace(one, origin=f"b.jsonl:{3 - number}") for number, one in enumerate(rows)]
    assert join([run("a", *rows), run("b", *moved)]).right_QR.tolist() == [[1, 1], [0, 0], [0, 0]]


@pytest.mark.guarantee("Runs that answered different questions are not compared.")
def test_other_questions_are_refused_and_what_differs_is_named():
    many = [asked(number, f"question {number}") for number in range(8)]
    with pytest.raises(UsageError) as caught:
        join([run("a", *many), run("b", *many[5:], asked(9, "another one")), run("c", *many)])
    assert str(caught.value).splitlines() == [
        "the runs cannot be compared, because they answered different questions:",
        '  b lacks 5 questions of a: "question 0" (a.jsonl:0), "question 1" (a.jsonl:1), '
        '"question 2" (a.jsonl:2) and 2 more',
        '  a lacks 1 question of b: "another one" (a.jsonl:9)',
        "evaluate them on the same records, with: lookonce eval RUN --split SPLIT",
    ]


def test_other_references_are_refused():
    with pytest.raises(UsageError, match=r"the references of 1 question differ from a to b: \"q\" \(a.jsonl:2\)"):
        join([run("a", asked(1), asked(2)), run("b", asked(1), asked(2, references=("yes", "no")))])


def answered(by: str, stages: list[str | None]) -> Run:
    """A run that answers each question with its own name."""
    rows = [
        Prediction(f"a.jsonl:{number}", ("a.jpg",), f"question {number}", "yes", by, "no", stage=stage)
        for number, stage in enumerate(stages)
    ]
    return Run(by, rows, by, 1)


@pytest.mark.guarantee("Routed predictions are those of each adapter alone, question by question.")
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
        r"^3 of 5 questions have no run to answer them: stage 4 \(1\), no stage \(2\); there are runs for stage 1, 2; "
        "name one for each stage$"
    )
    with pytest.raises(UsageError, match=message):
        route({"1": answered("a", stages), "2": answered("b", stages)}, "stage")
