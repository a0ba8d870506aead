"""Malformed records are collected, and the same mistake is one kind whatever its values are."""

from __future__ import annotations

import json

import pytest

from lookonce.datasets.records import Collector, RecordsFile, by_kind, kind_of
from lookonce.errors import RecordsError

GOOD = {"image_filename": "a.jpg", "question": "How many?", "answer": "3"}
LINES = [
    json.dumps(GOOD | {"answer": 3}),
    json.dumps(GOOD),
    '{"question": ',
    json.dumps(GOOD | {"answer": True}),
    "",
    json.dumps(GOOD | {"question": " "}),
    "[1, 2]",
    json.dumps(GOOD | {"answer": "four"}),
]


def collected(path, **options):
    malformed = Collector()
    records = list(RecordsFile(path, broken=malformed, **options))
    return [record.turns[0].answer for record in records], malformed


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_all_malformed_records_are_collected_and_the_others_are_read(tmp_path, name):
    path, numbers = tmp_path / name, [1, 3, 4, 6, 7]
    path.write_text("\n".join(LINES))
    if name == "a.json":
        path.write_text(f"[{','.join(line for line in LINES if line and line != LINES[2])}]")
        numbers = [1, 3, 4, 5]
    answers, malformed = collected(path)
    assert answers == ["3", "four"]
    sign = ":" if name == "a.jsonl" else ": record "
    assert [one.place for one in malformed] == [f"{path}{sign}{number}" for number in numbers]
    assert not any(str(path) in one.reason for one in malformed)


def test_a_mistake_is_one_kind_and_the_most_frequent_comes_first(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    _, malformed = collected(tmp_path / "a.jsonl")
    kinds = by_kind(malformed)
    assert [len(kind.places) for kind in kinds] == [2, 1, 1, 1]
    assert kinds[0].text().startswith("2 times: `answer` must be text that is not empty, got 3; put it into quotes")
    assert kinds[0].text().endswith(f"({tmp_path}/a.jsonl:1, {tmp_path}/a.jsonl:4)")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("`answer` must be text, got 3", "`answer` must be text, got [4, '; x']"),
        ("not JSON (Expecting ',' delimiter at column 12)", "not JSON (Expecting ',' delimiter at column 7)"),
        ("message 3 has the role 'tool'; not supported", 'message 5 has the role "to\'ol"; not supported'),
        ("expected the key `a`, got ['b']; look", "expected the key `a`, got ['c', 'd', 'e']; look"),
    ],
)
def test_messages_that_differ_in_values_are_one_kind(one, other):
    assert kind_of(one) == kind_of(other)


def test_messages_that_differ_in_keys_are_different_kinds():
    assert kind_of("`answer` must be text, got 3") != kind_of("`question` must be text, got 3")


def test_a_file_without_records_is_reported_and_a_missing_one_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    assert collected(tmp_path / "a.jsonl")[1][0].reason.startswith(f"{tmp_path}/a.jsonl has no records")
    with pytest.raises(RecordsError, match="no records file at"):
        collected(tmp_path / "b.jsonl")
