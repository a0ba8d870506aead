"""Rows: the keys of predictions where they fit, and CSV."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from lookonce.datasets.records import Record, Turn, check_target
from lookonce.errors import UsageError
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.predict import COLUMNS, SUFFIXES, answered, write_rows

ANSWER = Answer('yes, "two"\n', (1, 2, 3), -0.5, "stop")


def row(answer: str = "", *images: str, logprob: float = -0.5):
    turns = (Turn("before?", "no"), Turn("q", answer))
    record = Record(tuple(map(Path, images)), turns, metadata={"source": "x"}, origin="q.jsonl:3")
    answer = Answer("yes", (1,), logprob, "length")
    return answered((record, 1), (Turn("before?", "no"),), "predicted", ["key"] * len(images), answer)


def test_without_a_reference_nothing_is_said_about_it():
    assert row("", "/a.jpg") == {
        "version": 1,
        "origin": "q.jsonl:3",
        "images": (("/a.jpg"),),
        "question": "q",
        "predicted": "yes",
        "image_keys": ("key",),
        "turn": 1,
        "source": "x",
        "earlier": ({"question": "before?", "answer": "no"},),
        "earlier_answers": "predicted",
        "logprob": -0.5,
        "num_tokens": 1,
        "ended": "length",
    }
    assert row("yes")["right"] and row("no")["right"] is False and "majority" not in row("yes")
    assert "logprob" not in row(logprob=math.nan)


def test_rows_are_written_as_json_lines_and_as_a_table(tmp_path):
    record = Record((Path("/a.jpg"), Path("/b;.jpg")), (Turn("q, r?", ""),), origin="o")
    rows = [answered((record, 0), (), "predicted", ["1", "2"], ANSWER), row("yes", "/a.jpg"), row("")]
    write_rows(tmp_path / "a.jsonl", rows)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines == json.loads(json.dumps(rows))
    write_rows(tmp_path / "formula.csv", [rows[0] | {"question": "=1+1", "predicted": "-5"}])
    with (tmp_path / "formula.csv").open(newline="") as file:
        [formula] = csv.DictReader(file)
    assert (formula["question"], formula["predicted"], formula["logprob"]) == ("'=1+1", "-5", "-0.5")
    write_rows(tmp_path / "a.CSV", rows)
    with (tmp_path / "a.CSV").open(newline="") as file:
        first, second, third = csv.DictReader(file)
    assert tuple(first) == COLUMNS
    assert json.loads(first["images"]) == ["/a.jpg", "/b;.jpg"] and second["images"] == "/a.jpg"
    assert first["predicted"] == ANSWER.text and first["question"] == "q, r?" and first["right"] == ""
    assert (second["right"], second["logprob"], third["images"], third["ended"]) == ("true", "-0.5", "", "length")


def test_an_output_file_must_be_new_and_of_a_known_type(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    for name, message in (("b.xlsx", "the suffix decides"), ("a.jsonl", "exists; name another file, or replace it")):
        with pytest.raises(UsageError, match=message):
            check_target(tmp_path / name, None, SUFFIXES, overwrite=False)
    check_target(tmp_path / "a.jsonl", None, SUFFIXES, overwrite=True)
    check_target(tmp_path / "new.CSV", tmp_path / "a.jsonl", SUFFIXES, overwrite=False)
    with pytest.raises(UsageError, match="is also the file to read"):
        check_target(tmp_path / "a.jsonl", tmp_path / "a.jsonl", SUFFIXES, overwrite=True)
