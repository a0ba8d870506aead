"""Submissions: the shape of the challenges' published template, their scores and their rounding."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lookonce.errors import UsageError
from lookonce.eval.answers.files import AnsweringCost
from lookonce.eval.scores import match
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.submission import RULES, SubmissionInfo, notes, submission, to_text

TEMPLATE: dict[str, Any] = {
    "submission_info": {
        "Participant_Names": str,
        "Affiliations": str,
        "Contact_emails": [str],
        "Team_Name": str,
        "Country": str,
        "Notes_to_organizers": str,
    },
    "public_scores": {"bleu": float, "rouge1": float, "rouge2": float, "rougeL": float, "meteor": float},
    "predictions": [{"index": int, "img_id": str, "question": str, "answer": str}],
    "total_time": float,
    "time_per_item": float,
    "memory_used_mb": float,
    "model_memory_mb": float,
    "gpu_name": str,
    "debug": {
        "packages": [{"name": str, "version": str}],
        "system": {"python": str, "os": str, "platform": str, "arch": str},
    },
}
"""What submission_task1.py of both challenges writes to predictions_1.json."""
INFO = SubmissionInfo(Participant_Names="A. Body", Contact_emails=["a@b.example"], Team_Name="t", Country="c")
COST = AnsweringCost(num_answered=2, seconds=3.0, device="a GPU", model_mb=10.0, used_mb=0.5)


def prediction(name: str, answer: str, predicted: str, **values: Any) -> Prediction:
    return Prediction(f"a:{name}", (f"images/{name}.jpg",), "Is there text?", answer, predicted, "no", **values)


ROWS = [
    prediction("a.1", "no text is seen", " no text is seen \n"),
    prediction("b", "yes", "no"),
    prediction("c", "yes", "yes", references=("yes", "no")),
]


def shape(value: Any) -> Any:
    """The types in a value; those of a list from its first element."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    return [shape(value[0])] if isinstance(value, list) else type(value)


@pytest.mark.guarantee("A submission has the shape of the challenge's template.")
@pytest.mark.parametrize("challenge", RULES)
def test_a_submission_has_the_shape_of_the_published_template(challenge):
    pytest.importorskip("sacrebleu")
    value = json.loads(to_text(submission(ROWS, challenge, INFO, COST)))
    assert shape(value) == TEMPLATE
    assert list(value) == list(TEMPLATE) and list(value["predictions"][0]) == list(TEMPLATE["predictions"][0])
    assert [row["index"] for row in value["predictions"]] == [0, 1, 2] and value["predictions"][0]["img_id"] == "a.1"
    assert (value["time_per_item"], value["total_time"]) == (1.5, 4.5)


def test_each_challenge_has_its_own_spaces_and_digits():
    pytest.importorskip("sacrebleu")
    medico, gi = (submission(ROWS, challenge, INFO, COST) for challenge in RULES)
    assert [value["predictions"][0]["answer"] for value in (medico, gi)] == ["no text is seen", " no text is seen \n"]
    scores = match.TextMetrics([(one.answer,) for one in ROWS]).scores([one.predicted.strip() for one in ROWS])
    assert medico["public_scores"]["rouge1"] == round(scores["rouge1"], 4) == 0.6667
    assert gi["public_scores"]["rouge1"] == 0.67


def test_what_is_missing_from_a_submission_is_said():
    pytest.importorskip("sacrebleu")
    value = submission(ROWS, "medico", SubmissionInfo(), AnsweringCost())
    assert value["total_time"] is None and value["gpu_name"] is None
    said = "\n".join(notes(value, "medico"))
    assert "submission_info lacks Participant_Names, Affiliations, Contact_emails, Team_Name, Country;" in said
    assert "scores 1,500 public rows, and this split has 3 questions" in said and "not measured" in said


@pytest.mark.parametrize("row", [prediction("a", "x", "x", turn=1), Prediction("a:1", (), "q", "x", "x", "x")])
def test_questions_of_another_kind_are_refused(row):
    with pytest.raises(UsageError, match=r"a: the challenge asks one question about one image|about 0 images"):
        submission([row], "medico", INFO, COST)
