"""Predictions: rows of a file, their groups and counts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.datasets.records import Record, Turn
from lookonce.errors import RecordsError
from lookonce.eval.scores.prediction import (
    OPTIONAL,
    ROW,
    VERSION,
    Counts,
    Prediction,
    Score,
    label,
    macro,
    read_predictions,
    scores_by,
    training_answers,
    write_predictions,
)

PLAIN = Prediction("val.jsonl:1", ("a.jpg",), "Is there text?", "no", "no", "yes", image_keys=("0f",))
FULL = replace(
    PLAIN,
    origin="val.jsonl:2",
    references=("no", "none"),
    turn=1,
    source="polyps",
    category="yes/no",
    stage="1",
    system="Answer briefly.",
    earlier=(Turn("Is there a polyp?", "yes"),),
    logprob=-0.25,
    num_tokens=2,
    ended="stop",
)
OLD = {
    **{"origin": "val.jsonl:1", "images": ["a.jpg"], "question": "Is there text?", "answer": "no"},
    **{"predicted": "none", "majority": "yes", "right": False},
}


def write(path, *rows):
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_predictions_are_read_back(tmp_path):
    write_predictions(tmp_path / "val.jsonl", [PLAIN, FULL])
    assert read_predictions(tmp_path / "val.jsonl") == [PLAIN, FULL]
    older = write(tmp_path / "older.jsonl", FULL.to_json() | {"earlier_answers": "own", "context_answers": "true"})
    assert read_predictions(older) == [replace(FULL, earlier_answers="predicted", context_answers="reference")]
    first, second = (json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines())
    assert first["version"] == VERSION and first["right"] is True and OPTIONAL.isdisjoint(first)
    assert second["earlier"] == [{"question": "Is there a polyp?", "answer": "yes"}] and second["stage"] == "1"


@settings(max_examples=30)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_answer_of_a_model_is_read_back(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "val.jsonl"
    write_predictions(path, [replace(PLAIN, predicted=text, question=f"<b>{text}</b>")])
    assert read_predictions(path)[0].predicted == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_json_cannot_hold_is_left_out(value):
    assert "logprob" not in replace(PLAIN, logprob=value).to_json()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([PLAIN.to_json(), "", '{"origin": "val.js'], "val.jsonl:3: not JSON .*; the line is damaged: write the file"),
        ([PLAIN.to_json(), PLAIN.to_json()], r"val.jsonl:2 answers \"Is .*\?\" of val.jsonl:1 a second time, .*:1;"),
        ([OLD], r"val.jsonl:1 is not a prediction: it lacks `version`; expected rows as"),
        ([{"version": 1, "images": ["a.jpg"]}], r"val.jsonl:1 is not a prediction: it lacks `origin`; expected rows"),
        ([PLAIN.to_json() | {"ended": "tired"}], r"val.jsonl:1 is not a prediction: `ended`: .*'stop' or 'length'"),
        (
            [PLAIN.to_json(), PLAIN.to_json() | {"origin": "b:1", "earlier": [{"question": "q", "answer": "\ud800"}]}],
            r"val.jsonl:2 is not a prediction: it holds half a character",
        ),
        ([PLAIN.to_json() | {"version": 2}], r"val.jsonl:1 has version 2 .* update lookonce"),
        (["[1, 2]"], r"val.jsonl:1.* "),
        ([], r"has no predictions; write them with: lookonce eval"),
    ],
)
def test_what_is_not_a_prediction_is_named(tmp_path, rows, message):
    with pytest.raises(RecordsError, match=message):
        read_predictions(write(tmp_path / "val.jsonl", *rows))


@pytest.mark.parametrize(("value", "text"), [(None, None), ("a", "a"), (3, "3"), (["a", 1], '["a", 1]')])
def test_metadata_becomes_text(value, text):
    assert label(value) == text


def test_the_documented_keys_are_those_of_the_code(root):
    page = (root / "docs" / "predictions.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)`\*? \| (.+?) \|$", page, re.M))
    schema = ROW.json_schema()["properties"]
    described = {name: " ".join(values["description"].split()) for name, values in schema.items()}
    assert {name: documented.get(name) for name in described} == described
    assert documented.keys() - described.keys() == {"version", "right"}
    assert set(re.findall(r"^\| `(\w+)`\* ", page, re.M)) == OPTIONAL


TRAINING = training_answers(
    [
        Record((), (Turn("how many", "1"), Turn("text", "yes"))),
        Record((), (Turn("how many", "2"),), metadata={"references": ["2", "3"]}),
    ]
)


def predictions(*given: str, question: str = "how many", ended: str | None = None) -> list[Prediction]:
    return [Prediction("here:1", (), question, "1", text, "1", ended=ended) for text in given]


def test_empty_cut_different_wrong_and_unknown_answers_are_counted():
    assert Counts.of(predictions("1", " 2 ", "3", "yes", "4"), TRAINING).outside_training == 2
    counts = Counts.of(
        [*predictions("1", " ", "", ended="stop"), *predictions("7", "7", "8", ended="length")], TRAINING
    )
    assert counts == Counts(empty=2, cut=3, outside_training=5, distinct_wrong=3)
    assert counts.text() == "3 different wrong, 2 empty, 3 cut off, 5 never seen in training"


def prediction(is_right: bool, question: str = "q", **labels: str) -> Prediction:
    return Prediction("here:1", (), question, "yes", "yes" if is_right else "no", "yes", **labels)


ANSWERED = [
    prediction(True, "a", category="finding", stage="2"),
    prediction(False, "a", category="finding", stage="1"),
    prediction(True, "b", category="quality"),
    prediction(True, "b"),
]


def test_each_group_has_its_own_score_and_the_same_weight_in_the_mean():
    assert scores_by(ANSWERED, "question") == {"a": Score(2, 1 / 2, 1), "b": Score(2, 1, 1)}
    assert list(scores_by(ANSWERED, "stage")) == ["1", "2"]
    assert macro([Score(9, 1.0, 0.5), Score(1, 0.0, 0.25)]) == Score(10, 0.5, 0.375)
