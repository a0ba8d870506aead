"""Answers that are numbers or booleans: refused with advice, or read as their JSON text and counted."""

from __future__ import annotations

import json

import pytest

from lookonce.datasets.records import RecordsFile, read_records
from lookonce.errors import RecordsError

NUMBERS = [(3, "3"), (-2.5, "-2.5"), (3.0, "3.0"), (1e30, "1e+30"), (0.1, "0.1"), (True, "true"), (False, "false")]


def rows(answer):
    """A record of each kind of format, with this answer."""
    asked = {"role": "user", "content": "How many?"}
    return {
        "flat": {"image_filename": "a.jpg", "question": "How many?", "answer": answer},
        "canonical": {"turns": [{"question": "How many?", "answer": answer}]},
        "llava": {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": answer}]},
        "messages": {"images": [], "messages": [asked, {"role": "assistant", "content": answer}]},
        "alpaca": {"instruction": "How many?", "output": answer},
    }


def write(folder, *values):
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


@pytest.mark.parametrize(("answer", "text"), NUMBERS)
def test_numbers_and_booleans_become_the_text_of_json(tmp_path, answer, text):
    for row in rows(answer).values():
        file = RecordsFile(write(tmp_path, row, row), coerce_answers=True)
        assert [record.turns[0].answer for record in file] == [text, text] and file.num_coerced == 2


@pytest.mark.parametrize("form", rows(0))
@pytest.mark.parametrize("answer", [3, 2.5, True])
def test_without_it_the_error_names_what_to_do(tmp_path, form, answer):
    with pytest.raises(RecordsError) as refusal:
        read_records(write(tmp_path, rows(answer)[form]))
    assert f"must be text that is not empty, got {json.dumps(answer)}; put it into quotes, or let" in str(refusal.value)
    assert "lookonce data convert RECORDS OUT --coerce-answers" in str(refusal.value)


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf"), "", " ", ["a"], {"a": 1}])
def test_missing_values_and_other_types_stay_errors(tmp_path, answer):
    for row in rows(answer).values():
        with pytest.raises(RecordsError) as refusal:
            read_records(write(tmp_path, row), coerce_answers=True)
        assert "--coerce-answers" not in str(refusal.value)


def test_only_answers_are_changed(tmp_path):
    row = rows(3)["llava"] | {"answer": 4, "output": 5, "references": [6]}
    [record] = read_records(write(tmp_path, row), coerce_answers=True)
    assert record.metadata == {"answer": 4, "output": 5, "references": [6]}
    question = rows("yes")["flat"] | {"question": 3}
    with pytest.raises(RecordsError, match="`question` must be text that is not empty, got 3$"):
        read_records(write(tmp_path, question), coerce_answers=True)


def test_several_correct_answers_are_read_together(tmp_path):
    flat = rows(3)["flat"] | {"references": [3, 4]}
    canonical = rows(3)["canonical"] | {"metadata": {"references": [3, "4"]}}
    records = read_records(write(tmp_path, flat, canonical), coerce_answers=True)
    assert [record.references for record in records] == [("3", "4"), ("3", "4")]


def test_history_and_text_parts_are_answers_too(tmp_path):
    alpaca = rows(3)["alpaca"] | {"history": [["How many tubes?", 2]]}
    [record] = read_records(write(tmp_path, alpaca), coerce_answers=True)
    assert [turn.answer for turn in record.turns] == ["2", "3"]
    parts = rows([{"type": "text", "text": 3}])["messages"]
    [record] = read_records(write(tmp_path, parts), coerce_answers=True)
    assert record.turns[0].answer == "3"


def test_an_expected_format_coerces_as_well(tmp_path):
    [record] = read_records(write(tmp_path, rows(3)["llava"]), format="llava", coerce_answers=True)
    assert record.turns[0].answer == "3"
