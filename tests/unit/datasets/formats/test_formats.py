"""Reading the record formats: each is recognised by its keys, and all records of a file are of one kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import Record, RecordsFile, Turn, read_records
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
    "llava, text only": (
        "llava",
        {"conversations": [HUMAN | {"value": "Is there text?"}, GPT]},
        Record((), ASKED),
    ),
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
    "sharegpt, roles": (
        "sharegpt",
        {"images": [], "system": "", "conversations": [USER, ANSWER]},
        Record((), ASKED),
    ),
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
def test_a_format_is_recognised_by_its_keys_and_read(
    tmp_path: Path, format: str, row: dict[str, Any], expected: Record
) -> None:
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
        (
            {"turns": [{"question": "Q", "answer": "A"}]},
            llava(),
            "got the format llava; keep them in two files",
        ),
    ],
)
def test_all_records_of_a_file_have_the_format_of_the_first(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path, first, second)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}:2: ") and expected in str(refusal.value)


def test_a_format_that_is_given_is_not_guessed(tmp_path: Path) -> None:
    row = llava() | {"question": "Q", "answer": "A", "image_filename": "b.jpg"}
    path = write(tmp_path, row)
    assert read_records(path)[0].turns == (Turn("Q", "A"),)
    assert read_records(path, format="llava")[0].turns == ASKED
    with pytest.raises(RecordsError, match="train.jsonl:1: expected the key `messages`, got"):
        read_records(path, format="openai")
