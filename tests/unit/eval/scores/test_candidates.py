"""The likeliest candidates beside the greedy answers, in pairs over all questions."""

from __future__ import annotations

from dataclasses import replace

from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction

PLAIN = Prediction("val.jsonl:1", ("a.jpg",), "q", "yes", "no", "no")
ROWS = [
    *(replace(PLAIN, image_keys=(str(number),), candidate="yes", num_candidates=2) for number in range(10)),
    *(replace(PLAIN, image_keys=(str(number),), question="r") for number in range(10)),
    *(replace(PLAIN, image_keys=(str(number),), question="r", predicted="yes") for number in range(20)),
]
"""Ten questions whose candidate is right and whose greedy answer is wrong, and thirty without candidates."""


def test_questions_without_candidates_count_with_their_greedy_answers():
    score = Evaluation.of(ROWS).candidates
    assert (score.num_questions, score.exact_match, score.difference) == (10, 0.75, 0.25)
    assert score.by_question == {"q": 1.0, "r": 2 / 3}
    assert 0 < score.interval.low < 0.25 < score.interval.high


def test_the_table_has_them_beside_the_greedy_answers():
    evaluation = Evaluation.of(ROWS)
    by_question, beside, *_ = evaluation.text().split("\n\n")
    assert by_question.splitlines()[0].split() == ["question", "asked", "exact", "match", "candidates", "majority"]
    assert by_question.splitlines()[1].split() == ["q", "10", "0.0%", "100.0%", "0.0%"]
    assert by_question.splitlines()[-1].split()[-2:] == ["75.0%", "0.0%"]
    assert beside.splitlines()[1].split()[:6] == ["likeliest", "of", "10", "questions", "75.0%", "+25.0"]
    assert max(map(len, beside.splitlines())) <= 80
    assert evaluation.to_json()["candidates"]["exact_match"] == 0.75


def test_without_candidates_nothing_is_said():
    evaluation = Evaluation.of(ROWS[10:])
    assert evaluation.to_json()["candidates"] is None and "candidates" not in evaluation.text()
