"""Record formats: read and recognised, with numbers as answers, and without a last answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import Record, RecordsFile, Turn, read_records, write_records
from lookonce.errors import RecordsError

ASKED = (Turn("Is there text?", "yes"),)
TWICE = (*ASKED, Turn("Why?", "because"))
USER, ANSWER = {"role": "user", "content": "Is there text?"}, {"role": "assistant", "content": "yes"}
HUMAN, GPT = {"from": "human", "value": "<image>\nIs there text?"}, {"from": "gpt", "value": "yes"}


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def alternating(*contents: Any) -> list[dict[str, Any]]:
    """Alternating messages of user and assistant."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def parts(*contents: str | None) -> list[dict[str, str]]:
    """Text parts, and an image part for each None."""
    return [{"type": "image", "path": "a.jpg"} if c is None else {"type": "text", "text": c} for c in contents]


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, "detail": "high"}}


FORMATS: dict[str, tuple[str, dict[str, Any], Record]] = {
    "llava": (
        "llava",
        {"id": "1", "image": "a.jpg", "conversations": [HUMAN, GPT]},
        Record((Path("a.jpg"),), ASKED, metadata={"id": "1"}),
    ),
    "llava, tag at the end": (
        "llava",
        {"image": "a.jpg", "conversations": [HUMAN | {"value": "Is there text?\n<image>"}, GPT]},
        Record((Path("a.jpg"),), ASKED),
    ),
    "llava, no tag": (
        "llava",
        {"image": "a.jpg", "conversations": [HUMAN | {"value": "Is there text?"}, GPT]},
        Record((Path("a.jpg"),), ASKED),
    ),
    "llava, text only": ("llava", {"conversations": [HUMAN | {"value": "Is there text?"}, GPT]}, Record((), ASKED)),
    "llava, several images": (
        "llava",
        {"image": ["a.jpg", "b.jpg"], "conversations": [HUMAN | {"value": "<image>\n <image> Is there text?"}, GPT]},
        Record((Path("a.jpg"), Path("b.jpg")), ASKED),
    ),
    "sharegpt": (
        "sharegpt",
        {"images": ["a.jpg"], "conversations": [{"from": "system", "value": "Short."}, HUMAN, GPT]},
        Record((Path("a.jpg"),), ASKED, "Short."),
    ),
    "sharegpt, system as a key": (
        "sharegpt",
        {"images": ["a.jpg"], "system": "Short.", "conversations": [HUMAN, GPT], "videos": []},
        Record((Path("a.jpg"),), ASKED, "Short.", {"videos": []}),
    ),
    "sharegpt, roles": ("sharegpt", {"images": [], "system": "", "conversations": [USER, ANSWER]}, Record((), ASKED)),
    "alpaca": (
        "alpaca",
        {"instruction": "<image>Is there", "input": "text?", "output": "yes", "images": ["a.jpg"], "stage": 1},
        Record((Path("a.jpg"),), (Turn("Is there\ntext?", "yes"),), metadata={"stage": 1}),
    ),
    "alpaca, history": (
        "alpaca",
        {
            **{"instruction": "Why?", "input": "", "output": "because", "system": "Short.", "images": ["a.jpg"]},
            "history": [["<image>Is there text?", "yes"]],
        },
        Record((Path("a.jpg"),), TWICE, "Short."),
    ),
    "alpaca, text only": ("alpaca", {"instruction": "Is there text?", "output": "yes"}, Record((), ASKED)),
    "messages": (
        "messages",
        {"messages": alternating("<image>Is there text?", "yes", "Why?", "because"), "images": ["/abs/a.jpg"]},
        Record((Path("/abs/a.jpg"),), TWICE),
    ),
    "messages, images as objects": (
        "messages",
        {"messages": [USER, ANSWER], "images": [{"bytes": None, "path": "a.jpg"}]},
        Record((Path("a.jpg"),), ASKED),
    ),
    "messages, text only": ("openai", {"messages": [USER, ANSWER]}, Record((), ASKED)),
    "parts": (
        "parts",
        {"messages": alternating(parts(None, "Is there text?"), parts("yes"))},
        Record((Path("a.jpg"),), ASKED),
    ),
    "parts, several texts, image last": (
        "parts",
        {"messages": alternating(parts("Is there", " text?", None), "yes")},
        Record((Path("a.jpg"),), ASKED),
    ),
    "parts, a word like a tag": (
        "parts",
        {"messages": alternating(parts("What is <image>?"), parts("<image>"))},
        Record((), (Turn("What is <image>?", "<image>"),)),
    ),
    "parts, images as a key": (
        "parts",
        {
            "messages": alternating(
                [{"type": "image", "text": None, "index": 0}, {"type": "text", "text": "Is there text?"}],
                [{"type": "text", "text": "yes", "index": None}],
            ),
            "images": ["a.jpg"],
        },
        Record((Path("a.jpg"),), ASKED),
    ),
    "openai": (
        "openai",
        {
            "messages": [
                {"role": "system", "content": "Short."},
                *alternating([url("a.jpg"), *parts("Is there text?")], "yes"),
            ]
        },
        Record((Path("a.jpg"),), ASKED, "Short."),
    ),
    "openai, file URL": (
        "openai",
        {"messages": alternating([url("file:///abs/my%20frame.jpg"), *parts("Is there text?")], "yes")},
        Record((Path("/abs/my frame.jpg"),), ASKED),
    ),
    "flat": (
        "flat",
        {"image": "a.jpg", "question": "Is there text?", "answer": "yes", "source": "polyps"},
        Record((Path("a.jpg"),), ASKED, metadata={"source": "polyps"}),
    ),
    "flat, folder of images": (
        "flat",
        {"file_name": "a.jpg", "question": "Is there text?", "answer": "yes"},
        Record((Path("a.jpg"),), ASKED),
    ),
}


@pytest.mark.parametrize(("format", "row", "expected"), FORMATS.values(), ids=FORMATS.keys())
def test_a_format_is_recognised_by_its_keys_and_read(tmp_path, format, row, expected):
    file = RecordsFile(write(tmp_path, row))
    [record] = list(file)
    assert file.format == format
    assert record.images == tuple(tmp_path / image for image in expected.images)
    assert (record.turns, record.system, record.metadata) == (expected.turns, expected.system, expected.metadata)


def llava() -> dict[str, Any]:
    return {"image": "a.jpg", "conversations": [HUMAN, GPT]}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            llava(),
            {"messages": [USER, ANSWER]},
            "expected a record in the format llava, like the first one, got the format openai",
        ),
        (
            {"messages": [USER, ANSWER]},
            {"a": 1},
            "expected a record in the format openai, like the first one, got an object",
        ),
        ({"turns": [{"question": "Q", "answer": "A"}]}, llava(), "got the format llava; keep them in two files"),
    ],
)
def test_all_records_of_a_file_have_the_format_of_the_first(tmp_path, first, second, expected):
    path = write(tmp_path, first, second)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}:2: ") and expected in str(refusal.value)


def test_a_format_that_is_given_is_not_guessed(tmp_path):
    row = llava() | {"question": "Q", "answer": "A", "image_filename": "b.jpg"}
    path = write(tmp_path, row)
    assert read_records(path)[0].turns == (Turn("Q", "A"),)
    assert read_records(path, format="llava")[0].turns == ASKED
    with pytest.raises(RecordsError, match="train.jsonl:1: expected the key `messages`, got"):
        read_records(path, format="openai")


NUMBERS = [(3, "3"), (-2.5, "-2.5"), (3.0, "3.0"), (1e30, "1e+30"), (0.1, "0.1"), (True, "true"), (False, "false")]


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


def write_lines(folder, *values):
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return path


@pytest.mark.parametrize(("answer", "text"), NUMBERS)
def test_numbers_and_booleans_become_the_text_of_json(tmp_path, answer, text):
    for row in rows_of(answer).values():
        file = RecordsFile(write_lines(tmp_path, row, row), coerce_answers=True)
        assert [record.turns[0].answer for record in file] == [text, text] and file.num_coerced == 2


@pytest.mark.parametrize("form", rows_of(0))
@pytest.mark.parametrize("answer", [3, 2.5, True])
def test_without_it_the_error_names_what_to_do(tmp_path, form, answer):
    with pytest.raises(RecordsError) as refusal:
        read_records(write_lines(tmp_path, rows_of(answer)[form]))
    assert f"must be text that is not empty, got {json.dumps(answer)}; put it into quotes, or set" in str(refusal.value)
    assert "`data.coerce_answers: true`" in str(refusal.value)


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf"), "", " ", ["a"], {"a": 1}])
def test_missing_values_and_other_types_stay_errors(tmp_path, answer):
    for row in rows_of(answer).values():
        with pytest.raises(RecordsError) as refusal:
            read_records(write_lines(tmp_path, row), coerce_answers=True)
        assert "coerce_answers" not in str(refusal.value)


def test_only_answers_are_changed(tmp_path):
    row = rows_of(3)["llava"] | {"answer": 4, "output": 5, "references": [6]}
    [record] = read_records(write_lines(tmp_path, row), coerce_answers=True)
    assert record.metadata == {"answer": 4, "output": 5, "references": [6]}
    question = rows_of("yes")["flat"] | {"question": 3}
    with pytest.raises(RecordsError, match="`question` must be text that is not empty, got 3$"):
        read_records(write_lines(tmp_path, question), coerce_answers=True)


def test_several_correct_answers_are_read_together(tmp_path):
    flat = rows_of(3)["flat"] | {"references": [3, 4]}
    canonical = rows_of(3)["canonical"] | {"metadata": {"references": [3, "4"]}}
    records = read_records(write_lines(tmp_path, flat, canonical), coerce_answers=True)
    assert [record.references for record in records] == [("3", "4"), ("3", "4")]


def test_history_and_text_parts_are_answers_too(tmp_path):
    alpaca = rows_of(3)["alpaca"] | {"history": [["How many tubes?", 2]]}
    [record] = read_records(write_lines(tmp_path, alpaca), coerce_answers=True)
    assert [turn.answer for turn in record.turns] == ["2", "3"]
    parts = rows_of([{"type": "text", "text": 3}])["messages"]
    [record] = read_records(write_lines(tmp_path, parts), coerce_answers=True)
    assert record.turns[0].answer == "3"


def test_an_expected_format_coerces_as_well(tmp_path):
    [record] = read_records(write_lines(tmp_path, rows_of(3)["llava"]), format="llava", coerce_answers=True)
    assert record.turns[0].answer == "3"


OPEN_QUESTION = {"role": "user", "content": "<image>q"}
EARLIER = [OPEN_QUESTION, {"role": "assistant", "content": "a"}, {"role": "user", "content": "then"}]
ROWS = {
    "flat": {"image": "a.jpg", "question": "q"},
    "flat, empty": {"image": "a.jpg", "question": "q", "answer": ""},
    "canonical": {"images": ["a.jpg"], "turns": [{"question": "q"}]},
    "LLaVA": {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nq"}]},
    "ShareGPT": {"images": ["a.jpg"], "conversations": [{"from": "human", "value": "<image>q"}]},
    "Alpaca": {"instruction": "<image>q", "input": "", "output": "", "images": ["a.jpg"]},
    "messages": {"images": ["a.jpg"], "messages": [OPEN_QUESTION]},
}


def read_one(path, row):
    path.write_text(json.dumps(row))
    [record] = RecordsFile(path, unanswered=True)
    return record


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_question_without_an_answer_is_read_with_an_empty_one(tmp_path, row):
    record = read_one(tmp_path / "q.jsonl", row)
    assert record.turns == (Turn("q", ""),) and record.images == (tmp_path / "a.jpg",)
    with pytest.raises(RecordsError):
        read_records(tmp_path / "q.jsonl")


def test_answers_that_are_known_are_kept(tmp_path):
    row = {"images": ["a.jpg"], "messages": [*EARLIER, {"role": "assistant", "content": "b"}]}
    assert read_one(tmp_path / "q.jsonl", row).turns == (Turn("q", "a"), Turn("then", "b"))
    assert read_one(tmp_path / "q.jsonl", {"images": ["a.jpg"], "messages": EARLIER}).turns == (
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
        read_one(tmp_path / "q.jsonl", row)


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
