"""Empty answers, answers cut at the limit, and answers that training does not have."""

from __future__ import annotations

from lookonce.datasets.records import Record, Turn
from lookonce.eval.scores.prediction import Counts, Prediction, training_answers

TRAINING = training_answers(
    [
        Record((), (Turn("how many", "1"), Turn("text", "yes"))),
        Record((), (Turn("how many", "2"),), metadata={"references": ["2", "3"]}),
    ]
)


def predictions(*given: str, question: str = "how many", ended: str | None = None) -> list[Prediction]:
    return [Prediction("here:1", (), question, "1", text, "1", ended=ended) for text in given]


def test_all_references_are_training_answers():
    assert TRAINING == {"how many": {"1", "2", "3"}, "text": {"yes"}}


def test_an_answer_to_another_question_is_outside_the_training_answers():
    assert Counts.of(predictions("1", " 2 ", "3", "yes", "4"), TRAINING).outside_training == 2


def test_an_unknown_question_may_have_any_training_answer():
    assert Counts.of(predictions("yes", "no", question="new"), TRAINING).outside_training == 1


def test_empty_cut_and_different_wrong_answers_are_counted():
    counts = Counts.of(
        [*predictions("1", " ", "", ended="stop"), *predictions("7", "7", "8", ended="length")], TRAINING
    )
    assert counts == Counts(empty=2, cut=3, outside_training=5, distinct_wrong=3)
    assert counts.text() == "3 different wrong, 2 empty, 3 cut, 5 never seen in training"


def test_what_is_not_known_is_none():
    counts = Counts.of(predictions("2"))
    assert (counts.cut, counts.outside_training) == (None, None)
    assert counts.text() == "1 different wrong, 0 empty"
