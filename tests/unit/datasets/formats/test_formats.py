"""Record formats: read and recognised, with numbers as answers, and without a last answer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.rows import alternating, parts, write_lines

from lookonce.datasets.records import Record, RecordsFile, Turn, read_records
from lookonce.errors import RecordsError

ASKED = (Turn("Is there text?", "yes"),)
TWICE = (*ASKED, Turn("Why?", "because"))
USER, ANSWER = {"role": "user", "content": "Is there text?"}, {"role": "assistant", "content": "yes"}
HUMAN, GPT = {"from": "human", "value": "<image>\nIs there text?"}, {"from": "gpt", "value": "yes"}


def read_one(folder: Path, row: Any, **options: Any) -> Record:
    [record] = RecordsFile(write_lines(folder / "train.jsonl", row), **options)
    return record


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, "detail": "high"}}


def about(*images: str, turns: tuple[Turn, ...] = ASKED, **values: Any) -> Record:
    return Record(tuple(map(Path, images)), turns, **values)


def llava() -> dict[str, Any]:
    return {"image": "a.jpg", "conversations": [HUMAN, GPT]}


OPENAI = {"messages": [USER, ANSWER]}
LLAVA, PLAIN_LLAVA = [HUMAN, GPT], [HUMAN | {"value": "Is there text?"}, GPT]
SHORT, A = {"from": "system", "value": "Short."}, {"images": ["a.jpg"]}
ALPACA = {"instruction": "Why?", "input": "", "output": "because", "system": "Short.", **A}
FLAT = {"question": "Is there text?", "answer": "yes"}
WITH_NULLS = [{"type": "image", "text": None, "index": 0}, {"type": "text", "text": "Is there text?"}]
IN_ORDER = alternating([url("a.jpg"), *parts("Is there text?")], "yes")
SEVERAL = [{"question": turn.question, "answer": turn.answer} for turn in TWICE]
FORMATS: dict[str, tuple[dict[str, Any], Record]] = {
    "canonical": (
        {"images": ["a.jpg", "b/c.jpg"], "turns": SEVERAL, "system": "Short.", "metadata": {"source": "polyps"}},
        about("a.jpg", "b/c.jpg", turns=TWICE, system="Short.", metadata={"source": "polyps"}),
    ),
    "canonical, turns alone": ({"turns": SEVERAL[:1]}, about()),
    "llava": ({"id": "1", "image": "a.jpg", "conversations": LLAVA}, about("a.jpg", metadata={"id": "1"})),
    "llava, tag at the end": (
        {"image": "a.jpg", "conversations": [HUMAN | {"value": "Is there text?\n<image>"}, GPT]},
        about("a.jpg"),
    ),
    "llava, text only": ({"conversations": PLAIN_LLAVA}, about()),
    "llava, several images": (
        {"image": ["a.jpg", "b.jpg"], "conversations": [HUMAN | {"value": "<image>\n <image> Is there text?"}, GPT]},
        about("a.jpg", "b.jpg"),
    ),
    "sharegpt": ({**A, "conversations": [SHORT, *LLAVA]}, about("a.jpg", system="Short.")),
    "sharegpt, system as a key": (
        {**A, "system": "Short.", "conversations": LLAVA, "videos": []},
        about("a.jpg", system="Short.", metadata={"videos": []}),
    ),
    "alpaca": (
        {"instruction": "<image>Is there", "input": "text?", "output": "yes", **A, "stage": 1},
        about("a.jpg", turns=(Turn("Is there\ntext?", "yes"),), metadata={"stage": 1}),
    ),
    "alpaca, history": (
        ALPACA | {"history": [["<image>Is there text?", "yes"]]},
        about("a.jpg", turns=TWICE, system="Short."),
    ),
    "messages": (
        {"messages": alternating("<image>Is there text?", "yes", "Why?", "because"), "images": ["/abs/a.jpg"]},
        about("/abs/a.jpg", turns=TWICE),
    ),
    "parts": ({"messages": alternating(parts(None, "Is there text?"), parts("yes"))}, about("a.jpg")),
    "parts, several texts, image last": (
        {"messages": alternating(parts("Is there", " text?", None), "yes")},
        about("a.jpg"),
    ),
    "parts, a word like a tag": (
        {"messages": alternating(parts("What is <image>?"), parts("<image>"))},
        about(turns=(Turn("What is <image>?", "<image>"),)),
    ),
    "parts, images as a key": (
        {"messages": alternating(WITH_NULLS, [{"type": "text", "text": "yes", "index": None}]), **A},
        about("a.jpg"),
    ),
    "openai": ({"messages": [{"role": "system", "content": "Short."}, *IN_ORDER]}, about("a.jpg", system="Short.")),
    "openai, file URL": (
        {"messages": alternating([url("file:///abs/my%20frame.jpg"), *parts("Is there text?")], "yes")},
        about("/abs/my frame.jpg"),
    ),
    "flat": ({"image": "a.jpg", **FLAT, "source": "polyps"}, about("a.jpg", metadata={"source": "polyps"})),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_recognised_by_its_keys_and_read(tmp_path, name):
    row, expected = FORMATS[name]
    file = RecordsFile(write_lines(tmp_path / "train.jsonl", row))
    images = tuple(tmp_path / image for image in expected.images)
    assert [replace(record, origin="") for record in file] == [replace(expected, images=images)]
    assert file.format == name.partition(",")[0]


LIKE = ", like the first one, got"


def test_all_records_of_a_file_have_the_format_of_the_first(tmp_path):
    for first, second, expected in (
        (llava(), OPENAI, f"expected a record in the format llava{LIKE} the format openai"),
        (OPENAI, {"a": 1}, f"expected a record in the format openai{LIKE} an object"),
    ):
        with pytest.raises(RecordsError, match=f"train.jsonl:2: {expected}"):
            read_records(write_lines(tmp_path / "train.jsonl", first, second))


def test_a_format_that_is_given_is_not_guessed(tmp_path):
    row = llava() | {"question": "Q", "answer": "A", "image_filename": "b.jpg"}
    assert read_one(tmp_path, row).turns == (Turn("Q", "A"),)
    assert read_one(tmp_path, row, format="llava").turns == ASKED
    with pytest.raises(RecordsError, match="train.jsonl:1: expected the key `messages`, got"):
        read_one(tmp_path, row, format="openai")


NUMBERS = [(3, "3"), (3.0, "3.0"), (1e30, "1e+30"), (True, "true")]


def rows_of(answer):
    """A record of each kind of format, with this answer."""
    asked = {"role": "user", "content": "How many?"}
    return {
        "flat": {"image_filename": "a.jpg", "question": "How many?", "answer": answer},
        "canonical": {"turns": [{"question": "How many?", "answer": answer}]},
        "llava": {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": answer}]},
        "messages": {"images": [], "messages": [asked, {"role": "assistant", "content": answer}]},
        "alpaca": {"instruction": "How many?", "output": answer},
    }


@pytest.mark.parametrize(("answer", "text"), NUMBERS)
def test_numbers_and_booleans_become_the_text_of_json_or_the_error_names_what_to_do(tmp_path, answer, text):
    for row in rows_of(answer).values():
        with pytest.raises(RecordsError, match=f"got {re.escape(json.dumps(answer))}; put it .* --coerce-answers"):
            read_one(tmp_path, row)
        file = RecordsFile(write_lines(tmp_path / "train.jsonl", row, row), coerce_answers=True)
        assert [record.turns[0].answer for record in file] == [text, text] and file.num_coerced == 2


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf"), "", " ", ["a"], {"a": 1}])
def test_missing_values_and_other_types_stay_errors(tmp_path, answer):
    for row in rows_of(answer).values():
        with pytest.raises(RecordsError) as refusal:
            read_one(tmp_path, row, coerce_answers=True)
        assert "--coerce-answers" not in str(refusal.value)


def test_only_answers_are_changed_also_where_the_format_is_given(tmp_path):
    row = rows_of(3)["llava"] | {"answer": 4, "output": 5, "references": [6]}
    for options in ({}, {"format": "llava"}):
        record = read_one(tmp_path, row, coerce_answers=True, **options)
        assert record.metadata == {"answer": 4, "output": 5, "references": [6]} and record.turns[0].answer == "3"
    with pytest.raises(RecordsError, match="`question` must be text that is not empty, got 3$"):
        read_one(tmp_path, rows_of("yes")["flat"] | {"question": 3}, coerce_answers=True)


@pytest.mark.parametrize(
    ("row", "answers", "references"),
    [
        (rows_of(3)["flat"] | {"references": [3, 4]}, ["3"], ("3", "4")),
        (rows_of(3)["canonical"] | {"metadata": {"references": [3, "4"]}}, ["3"], ("3", "4")),
        (rows_of("3")["canonical"] | {"metadata": {"references": ["4", "3 ", "5"]}}, ["3"], ("3", "4", "5")),
        (rows_of("3")["canonical"] | {"metadata": {"references": ["4", "5"]}}, ["3"], ()),  # of another kind
        (rows_of(3)["alpaca"] | {"history": [["How many tubes?", 2]]}, ["2", "3"], ()),
        (rows_of([{"type": "text", "text": 3}])["messages"], ["3"], ()),
    ],
)
def test_references_and_history_and_text_parts_are_answers_too(tmp_path, row, answers, references):
    record = read_one(tmp_path, row, coerce_answers=True)
    assert ([turn.answer for turn in record.turns], record.references) == (answers, references)


OPEN_QUESTION = {"role": "user", "content": "<image>q"}
ROWS = {
    "flat": {"image": "a.jpg", "question": "q"},
    "flat, empty": {"image": "a.jpg", "question": "q", "answer": ""},
    "canonical": {"images": ["a.jpg"], "turns": [{"question": "q"}]},
    "LLaVA": {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nq"}]},
    "ShareGPT": {"images": ["a.jpg"], "conversations": [{"from": "human", "value": "<image>q"}]},
    "Alpaca": {"instruction": "<image>q", "input": "", "output": "", "images": ["a.jpg"]},
    "messages": {"images": ["a.jpg"], "messages": [OPEN_QUESTION]},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_question_without_an_answer_is_read_with_an_empty_one(tmp_path, row):
    record = read_one(tmp_path, row, unanswered=True)
    assert record.turns == (Turn("q", ""),) and record.images == (tmp_path / "a.jpg",)
    with pytest.raises(RecordsError):
        read_one(tmp_path, row)


def test_a_table_needs_no_column_of_answers(tmp_path):
    (tmp_path / "q.csv").write_text("image,question,stage\na.jpg,q,1\nb.jpg,r,2\n")
    records = list(RecordsFile(tmp_path / "q.csv", unanswered=True))
    assert [record.turns for record in records] == [(Turn("q", ""),), (Turn("r", ""),)]
    assert records[1].metadata == {"stage": "2"}
