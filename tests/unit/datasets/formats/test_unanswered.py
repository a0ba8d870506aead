"""The last question of a record may lack its answer, in every record format; earlier answers may not."""

from __future__ import annotations

import json

import pytest

from lookonce.datasets.records import RecordsFile, Turn, read_records, write_records
from lookonce.errors import RecordsError

USER = {"role": "user", "content": "<image>q"}
EARLIER = [USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "then"}]
ROWS = {
    "flat": {"image": "a.jpg", "question": "q"},
    "flat, empty": {"image": "a.jpg", "question": "q", "answer": ""},
    "canonical": {"images": ["a.jpg"], "turns": [{"question": "q"}]},
    "LLaVA": {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nq"}]},
    "ShareGPT": {"images": ["a.jpg"], "conversations": [{"from": "human", "value": "<image>q"}]},
    "Alpaca": {"instruction": "<image>q", "input": "", "output": "", "images": ["a.jpg"]},
    "messages": {"images": ["a.jpg"], "messages": [USER]},
}


def read(path, row):
    path.write_text(json.dumps(row))
    [record] = RecordsFile(path, unanswered=True)
    return record


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_question_without_an_answer_is_read_with_an_empty_one(tmp_path, row):
    record = read(tmp_path / "q.jsonl", row)
    assert record.turns == (Turn("q", ""),) and record.images == (tmp_path / "a.jpg",)
    with pytest.raises(RecordsError):
        read_records(tmp_path / "q.jsonl")


def test_answers_that_are_known_are_kept(tmp_path):
    row = {"images": ["a.jpg"], "messages": [*EARLIER, {"role": "assistant", "content": "b"}]}
    assert read(tmp_path / "q.jsonl", row).turns == (Turn("q", "a"), Turn("then", "b"))
    assert read(tmp_path / "q.jsonl", {"images": ["a.jpg"], "messages": EARLIER}).turns == (
        Turn("q", "a"),
        Turn("then", ""),
    )


@pytest.mark.parametrize(
    "row",
    [
        {"images": ["a.jpg"], "turns": [{"question": "q"}, {"question": "then", "answer": "a"}]},
        {"images": ["a.jpg"], "turns": []},
        {"image": "a.jpg", "question": " "},
        {"image": "a.jpg", "question": "q", "answer": 3},
    ],
)
def test_all_else_is_as_strict_as_before(tmp_path, row):
    with pytest.raises(RecordsError):
        read(tmp_path / "q.jsonl", row)


def test_a_table_needs_no_column_of_answers(tmp_path):
    (tmp_path / "q.csv").write_text("image,question,stage\na.jpg,q,1\nb.jpg,r,2\n")
    records = list(RecordsFile(tmp_path / "q.csv", unanswered=True))
    assert [record.turns for record in records] == [(Turn("q", ""),), (Turn("r", ""),)]
    assert records[1].metadata == {"stage": "2"}


def test_records_with_answers_are_read_the_same(tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps(ROWS["flat"] | {"answer": "yes"}))
    records = read_records(tmp_path / "q.jsonl")
    for format in ("canonical", "sharegpt", "llava", "alpaca", "messages", "parts", "openai"):
        write_records(tmp_path / "again.jsonl", records, format=format)
        [again] = RecordsFile(tmp_path / "again.jsonl", unanswered=True)
        assert again.turns == records[0].turns
