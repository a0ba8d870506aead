"""The forms that people bring: each reads as what it says, or is refused with where and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import Record, RecordsFile, Turn, read_records
from lookonce.errors import RecordsError

ASKED = (Turn("Is there text?", "yes"),)
TWICE = (*ASKED, Turn("Why?", "because"))
USER, ANSWER = {"role": "user", "content": "Is there text?"}, {"role": "assistant", "content": "yes"}
HUMAN, GPT = {"from": "human", "value": "<image>\nIs there text?"}, {"from": "gpt", "value": "yes"}


def write(folder: Path, *rows: Any, name: str = "train.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def said(*contents: Any) -> list[dict[str, Any]]:
    """Messages of user and assistant in turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def parts(*contents: str | None) -> list[dict[str, str]]:
    """Parts of text, and an image for each None."""
    return [{"type": "image", "path": "a.jpg"} if c is None else {"type": "text", "text": c} for c in contents]


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address, "detail": "high"}}


FORMS: dict[str, tuple[str, dict[str, Any], Record]] = {
    "llava": (
        "llava",
        {"id": "1", "image": "a.jpg", "conversations": [HUMAN, GPT]},
        Record((Path("a.jpg"),), ASKED, metadata={"id": "1"}),
    ),
    "llava, mark at the end": (
        "llava",
        {"image": "a.jpg", "conversations": [HUMAN | {"value": "Is there text?\n<image>"}, GPT]},
        Record((Path("a.jpg"),), ASKED),
    ),
    "llava, no mark": (
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
    "sharegpt, system beside it": (
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
        {"messages": said("<image>Is there text?", "yes", "Why?", "because"), "images": ["/abs/a.jpg"]},
        Record((Path("/abs/a.jpg"),), TWICE),
    ),
    "messages, objects of images": (
        "messages",
        {"messages": [USER, ANSWER], "images": [{"bytes": None, "path": "a.jpg"}]},
        Record((Path("a.jpg"),), ASKED),
    ),
    "messages, text only": ("openai", {"messages": [USER, ANSWER]}, Record((), ASKED)),
    "parts": (
        "parts",
        {"messages": said(parts(None, "Is there text?"), parts("yes"))},
        Record((Path("a.jpg"),), ASKED),
    ),
    "parts, texts in pieces, image last": (
        "parts",
        {"messages": said(parts("Is there", " text?", None), "yes")},
        Record((Path("a.jpg"),), ASKED),
    ),
    "parts, a word like a mark": (
        "parts",
        {"messages": said(parts("What is <image>?"), parts("<image>"))},
        Record((), (Turn("What is <image>?", "<image>"),)),
    ),
    "parts, images beside them": (
        "parts",
        {
            "messages": said(
                [{"type": "image", "text": None, "index": 0}, {"type": "text", "text": "Is there text?"}],
                [{"type": "text", "text": "yes", "index": None}],
            ),
            "images": ["a.jpg"],
        },
        Record((Path("a.jpg"),), ASKED),
    ),
    "openai": (
        "openai",
        {"messages": [{"role": "system", "content": "Short."}, *said([url("a.jpg"), *parts("Is there text?")], "yes")]},
        Record((Path("a.jpg"),), ASKED, "Short."),
    ),
    "openai, file URL": (
        "openai",
        {"messages": said([url("file:///abs/my%20frame.jpg"), *parts("Is there text?")], "yes")},
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


@pytest.mark.parametrize(("form", "row", "expected"), FORMS.values(), ids=FORMS.keys())
def test_a_form_is_known_by_its_keys_and_read(tmp_path: Path, form: str, row: dict[str, Any], expected: Record) -> None:
    file = RecordsFile(write(tmp_path, row))
    [record] = list(file)
    assert file.form == form
    assert record.images == tuple(tmp_path / image for image in expected.images)
    assert (record.turns, record.system, record.metadata) == (expected.turns, expected.system, expected.metadata)


def llava(question: Any = HUMAN["value"], *more: Any, **values: Any) -> dict[str, Any]:
    return {"image": "a.jpg", "conversations": [HUMAN | {"value": question}, GPT, *more]} | values


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "mark in the middle": (llava("Is <image> a polyp?"), "<image> in the middle of the first question; lookonce shows"),
    "mark in a later turn": (
        llava(HUMAN["value"], HUMAN | {"value": "<image>And this?"}, GPT, image=["a.jpg", "b.jpg"]),
        "<image> in message 3, of the user; lookonce shows images before the first question; move it there",
    ),
    "mark in an answer": (
        llava("Q", {"from": "human", "value": "A"}, GPT | {"value": "<image>"}),
        "in message 4, of the a",
    ),
    "mark in the system text": (
        {"conversations": [{"from": "system", "value": "<image>"}, HUMAN, GPT], "image": "a.jpg"},
        "<image> in message 1, of the system",
    ),
    "fewer marks": (llava(image=["a.jpg", "b.jpg"]), "1 mark <image> and 2 images; expected as many, or no marks"),
    "a mark and no image": (llava(image=None), "1 mark <image> and 0 images"),
    "nothing but a mark": (llava("<image>\n"), "`question` must be text that is not empty, got ''"),
    "two images keys": (llava(images=["b.jpg"]), "images under `image` and under `images`; expected one of the two"),
    "two questions": (llava("Q", HUMAN | {"value": "R"}), "the last question has no answer"),
    "question after question": (
        {"conversations": [HUMAN, HUMAN, GPT], "image": "a.jpg"},
        "<image> in message 2, of the user",
    ),
    "answer after answer": (llava("Q", GPT), "message 3 is of the assistant; expected a question of the user there"),
    "answer first": ({"conversations": [GPT]}, "message 1 is of the assistant; expected a question of the user"),
    "no answer": ({"conversations": [HUMAN], "image": "a.jpg"}, "the last question has no answer; training needs one"),
    "no messages": ({"conversations": []}, "it has no messages; expected at least one question and answer"),
    "tool call": (llava("Q", {"from": "function_call", "value": "{}"}), "'function_call'; tool calls are not trained"),
    "unknown speaker": (
        llava("Q", {"from": "bard", "value": "A"}),
        "message 3 is of 'bard'; expected one of system, user",
    ),
    "system in between": (
        llava("Q", {"from": "system", "value": "A"}),
        "message 3 is a system text; expected it first",
    ),
    "two system texts": (
        {"conversations": [{"from": "system", "value": "A"}, HUMAN, GPT], "image": "a.jpg", "system": "B"},
        "two system texts",
    ),
    "a weight that would be lost": (
        {"messages": [USER, ANSWER | {"weight": 0.5}]},
        "message 2 has `weight`, which would be lost; expected ['role', 'content']",
    ),
    "not learned from": ({"messages": [USER, ANSWER | {"loss": False}]}, "message 2 has `loss`"),
    "tools": ({"messages": [USER, ANSWER], "tools": [{}]}, "it has `tools`, and tool calls are not trained on"),
    "video": (llava(video="a.mp4"), "it has `video`, and videos are not trained on"),
    "boxes": ({"messages": [USER, ANSWER], "objects": {"bbox": [[1]]}}, "it has `objects`"),
    "image part in the middle": (
        {"messages": said(parts("Is", None, "a polyp?"), "yes")},
        "an image in the middle of message 1",
    ),
    "image part in a later turn": (
        {"messages": said(parts("Q"), "A", parts(None, "Q"), "A")},
        "an image in message 3, of the user",
    ),
    "image part in an answer": (
        {"messages": said(parts("Q"), parts(None, "A"))},
        "an image in message 2, of the assist",
    ),
    "image part of nothing": (
        {"messages": said([{"type": "image"}], "A")},
        "1 parts show an image without saying which",
    ),
    "images of no part": (
        {"messages": said(parts(None, "Q"), "A"), "images": ["b.jpg"]},
        "0 parts show an image without",
    ),
    "index of another": (
        {"messages": said([{"type": "image", "index": 1}, *parts("Q")], "A"), "images": ["a.jpg"]},
        "image part 0 has the index 1; expected them in order",
    ),
    "sound part": (
        {"messages": said([{"type": "audio", "path": "a"}], "A")},
        "has a part that is an object with ['path'",
    ),
    "sized image part": (
        {"messages": said([{"type": "image", "path": "a.jpg", "max_pixels": 9}, *parts("Q")], "A")},
        "message 1 has a part with `max_pixels`, which would be lost",
    ),
    "content of no kind": (
        {"messages": [USER | {"content": 3}, ANSWER]},
        "`question` must be text that is not empty, got 3",
    ),
    "message of no kind": ({"messages": ["Q"]}, "message 1 must be an object with ['role', 'content'], got 'Q'"),
    "messages of no kind": ({"messages": "Q"}, "`messages` must be a list, got 'Q'"),
    "instruction empty": ({"instruction": "", "output": "A"}, "`instruction` must be text that is not empty, got ''"),
    "history of no kind": (
        {"instruction": "Q", "output": "A", "history": [["Q"]]},
        "`history` must be pairs of a ques",
    ),
    "http": (
        llava(image="https://example.org/a.jpg"),
        "is not on this machine; download it and give its path: a training",
    ),
    "bucket": (llava(image="s3://frames/a.jpg"), "is not on this machine; download it and give its path"),
    "another machine": (llava(image="file://there/a.jpg"), "names another machine; expected file:///path/to/a.jpg"),
    "data URL": (llava(image="data:image/png;base64,AAAA"), "write them out as files with: lookonce data convert"),
    "bytes": (llava(image={"bytes": "AAAA"}), "the image is embedded in the record"),
    "base64": (llava(image="iVBORw0KGgo" + "A" * 89), "the image is embedded in the record"),
    "data URL cut short": (llava(image="data:image/png;base64"), "is no whole data: URL; it has no comma"),
    "another machine, half named": (
        llava(image="file://[there/a.jpg"),
        "names another machine; expected file:///path/to/a.jpg",
    ),
    "image of no kind": (
        llava(image={"name": "a.jpg"}),
        "an image must have `bytes` or `path`, got an object with ['n",
    ),
    "half a character": (llava("<image>\ud800?"), "`question` holds half a character (a lone surrogate)"),
    "image by its id": (
        {"img_id": "a", "question": "Q", "answer": "A"},
        "expected the key `image_filename`, got ['answer', 'img_id', 'question']; lookonce data prepare finds",
    ),
}


@pytest.mark.parametrize(("row", "expected"), BAD.values(), ids=BAD.keys())
def test_what_would_be_lost_or_misread_is_refused_with_file_line_and_reason(
    tmp_path: Path, row: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path, row)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}:1: ") and expected in message
    assert len(message) < 700


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            llava(),
            {"messages": [USER, ANSWER]},
            "expected a record of the form llava, as the first one is, and it is of",
        ),
        (
            {"messages": [USER, ANSWER]},
            {"a": 1},
            "expected a record of the form openai, as the first one is, got an obj",
        ),
        ({"turns": [{"question": "Q", "answer": "A"}]}, llava(), "and it is of the form llava; keep them in two files"),
    ],
)
def test_all_records_of_a_file_are_of_the_form_of_the_first(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path, first, second)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}:2: ") and expected in str(refusal.value)


def test_a_form_that_is_named_is_not_looked_for(tmp_path: Path) -> None:
    row = llava() | {"question": "Q", "answer": "A", "image_filename": "b.jpg"}
    path = write(tmp_path, row)
    assert read_records(path)[0].turns == (Turn("Q", "A"),)
    assert read_records(path, form="llava")[0].turns == ASKED
    with pytest.raises(RecordsError, match="train.jsonl:1: expected the key `messages`, got"):
        read_records(path, form="openai")


# Files.


def test_an_array_is_read_like_lines_and_says_where_each_record_begins(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text("\ufeff\n [" + json.dumps(llava(), indent=1) + ",\n\n" + json.dumps(llava("Q")) + "\n]\n", "utf-8")
    records = read_records(path)
    assert [record.turns[0].question for record in records] == ["Is there text?", "Q"]
    assert records[0].origin == f"{path}:2"
    assert records[1].origin == f"{path}:{path.read_text('utf-8').count(chr(10)) - 1}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", "train.json holds no records; expected one JSON object a line, an array of them, CSV"),
        ("[1]", "train.json:1: expected a JSON object, got 1"),
        ('[{"turns": 1},', "train.json:1: `turns` must be a list"),
        ("[\n{} {}]", "train.json:2: "),
        ("[\n\n{", "train.json:3: not JSON (Expecting property name"),
        ("[{}", "train.json:1: "),
        ("[" * 100_000, "train.json:1: not JSON that can be read"),
    ],
)
def test_a_bad_array_is_refused_with_where(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert expected in str(refusal.value)


GOOD = json.dumps({"image_filename": "a.jpg", "question": "Q", "answer": "A"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"[{GOOD}", "train.json: after the record of line 1 comes neither a comma nor a ]; is it cut off?"),
        (f"[{GOOD} {GOOD}]", "comes neither a comma nor a ]"),
        (f"[{GOOD},]", "train.json:1: not JSON (Expecting value"),
        (f"[{GOOD}]\n[{GOOD}]", "train.json: more comes after the end of its array"),
    ],
)
def test_an_array_that_does_not_end_well_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert expected in str(refusal.value)


def test_a_table_has_a_record_a_row_and_an_empty_cell_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('\ufeffimage,question,answer,source\r\na.jpg,"Is it, ""so""\nor not?",yes,\r\n\r\nb.jpg,Q,A,x\r\n')
    first, second = read_records(path)
    assert first.turns == (Turn('Is it, "so"\nor not?', "yes"),)
    assert (first.metadata, second.metadata) == ({}, {"source": "x"})
    assert (first.origin, second.origin) == (f"{path}:2", f"{path}:5")
    path.rename(tmp_path / "train.tsv").write_text("image\tquestion\tanswer\na.jpg\tQ, q\tA\n")
    assert read_records(tmp_path / "train.tsv")[0].turns == (Turn("Q, q", "A"),)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "image,question,answer\na.jpg,Is it, so?,yes\n",
            "train.csv:2: it has 4 cells, and the head 3; are commas quoted?",
        ),
        ("image,question,question\n", "train.csv:1: two columns are called 'question'"),
        ("image;question;answer\na.jpg;Q;A\n", "train.csv:2: expected the key `turns` (canonical form) or `question`"),
        ('image,question,answer\na.jpg,"Q"q,A\n', "train.csv:2: not CSV"),
        ("image,question,answer\na.jpg,,A\n", "train.csv:2: expected"),
        ("image,question,answer\n", "train.csv holds no records"),
        ("", "train.csv holds no records"),
    ],
)
def test_a_bad_table_is_refused_with_where(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "train.csv"
    path.write_text(content)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert expected in str(refusal.value)


# Images.


@pytest.mark.parametrize(
    "form", [lambda name: llava(image=name), lambda name: {**json.loads(GOOD), "image_filename": name}]
)
@pytest.mark.parametrize(
    "name", ["{}/there/a.jpg", "file://{}/there/a.jpg", "file://localhost{}/there/a.jpg", "/{}/there/a.jpg"]
)
def test_an_absolute_path_is_itself_unless_a_root_is_named(
    tmp_path: Path, form: Callable[[str], dict[str, Any]], name: str
) -> None:
    records = tmp_path / "here"
    records.mkdir()
    path = write(records, form(name.format(tmp_path)))
    assert read_records(path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert read_records(path, tmp_path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert str(read_records(path, records)[0].images[0]) == f"{records}/../there/a.jpg"


def test_a_relative_path_never_leads_out_even_where_an_absolute_one_may(tmp_path: Path) -> None:
    records = tmp_path / "here"
    records.mkdir()
    [record] = read_records(write(records, llava(image="../there/a.jpg")))
    assert str(record.images[0]) == f"{records}/../there/a.jpg"
