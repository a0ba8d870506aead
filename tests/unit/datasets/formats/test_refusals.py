"""What is refused: in each record format, and in any of them, as a record is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.rows import alternating, parts, png, run, write_lines

from lookonce.datasets.records import read_records
from lookonce.errors import RecordsError
from lookonce.families.family import CONTROL_TOKENS

HUMAN, GPT = {"from": "human", "value": "<image>\nIs there text?"}, {"from": "gpt", "value": "yes"}


def llava(question: Any = HUMAN["value"], *more: Any, **values: Any) -> dict[str, Any]:
    return {"image": "a.jpg", "conversations": [HUMAN | {"value": question}, GPT, *more]} | values


def in_parts(image: dict[str, Any]) -> dict[str, Any]:
    return {"messages": alternating([image, *parts("Q")], "A")}


def said(first: Any, *more: Any, **values: Any) -> dict[str, Any]:
    return {"image": "a.jpg", "conversations": [first, *more]} | values


def messages(*contents: Any, **values: Any) -> dict[str, Any]:
    return {"messages": alternating(*contents)} | values


A, USUAL, LATER = ["a.jpg"], alternating("Is there text?", "yes"), HUMAN | {"value": "<image>And this?"}
CALL, BARD, SYSTEM = ({"from": speaker, "value": "A"} for speaker in ("function_call", "bard", "system"))
NEEDS_TEXT, NO_SIZE = (
    "must be text that is not empty, got",
    "`, which would be lost, since all images of a run have the same",
)
SIZED: dict[str, dict[str, Any]] = {
    "min_pixels of Qwen's part": in_parts({"type": "image", "image": "a.jpg", "min_pixels": 9}),
    "max_pixels of a message": {"messages": [USUAL[0] | {"max_pixels": 9}, USUAL[1]], "images": A},
    "max_pixels of a flat record": {"image": "a", "question": "Q", "answer": "A", "max_pixels": 9},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "tag in the middle": (llava("Is <image> a polyp?"), "<image> in the middle of the first question; lookonce shows"),
    "tag in a later turn": (
        llava(HUMAN["value"], LATER, GPT, image=["a.jpg", "b.jpg"]),
        "<image> in message 3, of the user; lookonce shows images before the first question; move it there",
    ),
    "tag in an answer": (llava("Q", HUMAN | {"value": "A"}, GPT | {"value": "<image>"}), "in message 4, of the a"),
    "fewer tags": (llava(image=["a.jpg", "b.jpg"]), "1 <image> tag and 2 images; expected one tag for each image"),
    "two images keys": (llava(images=["b.jpg"]), "both `image` and `images` have a value; expected one of"),
    "answer first": ({"conversations": [GPT]}, "message 1 has the role assistant; expected a question of the user"),
    "no answer": (said(HUMAN), "the last question has no answer; training needs one"),
    "tool call": (llava("Q", CALL), "'function_call'; tool calls are not supported"),
    "system in between": (llava("Q", SYSTEM), "message 3 is a system text; expected it first"),
    "two system texts": (said(SYSTEM, HUMAN, GPT, system="B"), "two system texts"),
    "a weight that would be lost": (
        {"messages": [USUAL[0], USUAL[1] | {"weight": 0.5}]},
        "message 2 has `weight`, which would be lost; expected ['role', 'content']",
    ),
    "tools": ({"messages": USUAL, "tools": [{}]}, "it has `tools`; tool calls are not supported"),
    "boxes": ({"messages": USUAL, "objects": {"bbox": [[1]]}}, "it has `objects`"),
    "image part in the middle": (messages(parts("Is", None, "a polyp?"), "yes"), "an image in the middle of message 1"),
    "image part later": (messages(parts("Q"), "A", parts(None, "Q"), "A"), "an image in message 3, of the user"),
    "image part without a reference": (
        messages([{"type": "image"}], "A"),
        "1 image parts have no reference of their own, and `images` has 0",
    ),
    "wrong index": (
        messages([{"type": "image", "index": 1}, *parts("Q")], "A", images=A),
        "image part 0 has the index 1; expected them in order",
    ),
    "audio part": (
        messages([{"type": "audio", "path": "a"}], "A"),
        "has a part that is an object with ['path', 'type'], of type 'audio'; expected one of type text",
    ),
    **{name: (row, f"`{name.partition(' ')[0]}{NO_SIZE}") for name, row in SIZED.items()},
    "instruction empty": ({"instruction": "", "output": "A"}, f"`instruction` {NEEDS_TEXT} ''"),
    "history": ({"instruction": "Q", "output": "A", "history": [["Q"]]}, "`history` must be pairs of a ques"),
    "http": (
        llava(image="https://example.org/a.jpg"),
        "is not on this machine; download it and use its path, because what",
    ),
    "another machine": (llava(image="file://there/a.jpg"), "names another machine; expected file:///path/to/a.jpg"),
    "data URL": (llava(image="data:image/png;base64,AAAA"), "extract them with: lookonce data convert"),
    "base64": (llava(image="iVBORw0KGgo" + "A" * 5000), "is not a path; embedded images are data: URLs in base64"),
    "image of a wrong type": (llava(image={"name": "a"}), "must have `bytes` or `path`, got an object with ['n"),
}


@pytest.mark.parametrize(("row", "expected"), BAD.values(), ids=BAD.keys())
def test_what_would_be_lost_or_misread_is_refused_with_file_line_and_reason(tmp_path, row, expected):
    path = write_lines(tmp_path / "train.jsonl", row)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}:1: ") and expected in message
    assert len(message) < 700


HALF = "holds half a character (a lone surrogate)"
FLAT = {"image": "a.jpg", "question": "Q", "answer": "A"}
ONE = {"images": [], "turns": [{"question": "Q", "answer": "A"}]}
CHAT = messages("Q", "A")


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "surrogate in metadata": (ONE | {"metadata": {"note": "\ud800"}}, f"`note` {HALF}"),
    "surrogate deep in metadata": (ONE | {"metadata": {"a": [{"b": {"c": "\udfff"}}]}}, f"`a.b.c` {HALF}"),
    "surrogate in a key": (ONE | {"metadata": {"a": {"\ud800": 1}}}, f"a key of `a` {HALF}"),
    "surrogate in an image name": (CHAT | {"images": ["\ud800.jpg"]}, f"`image` {HALF}"),
    "file name that is not UTF-8": (CHAT | {"images": ["file:///caf%E9.jpg"]}, "is not UTF-8, in which results name"),
    "deep metadata": (ONE | {"metadata": {"a": deep(60)}}, "`a` is nested more than 50 deep; leave it out"),
}  # fmt: skip
UNUSABLE |= {
    "token in an answer": (
        FLAT | {"answer": "no<|im_end|>"},
        "`answer` contains <|im_end|>, a special token of the model, got 'no<|im_end|>'; remove it",
    ),
    "token in a reference": (
        ONE | {"metadata": {"references": ["A", "<|im_end|>"]}},
        "`references` contains <|im_end|>",
    ),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("row", "says"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_bad_record_is_refused_by_every_command_that_reads_records(sample, row, says):
    write_lines(Path("r.jsonl"), CHAT if "messages" in row else ONE, row)
    Path("run.yaml").write_text(f"model: {{path: {sample}/model}}\ndata: {{train: r.jsonl}}\noutput: out\n")
    for words in (("data", "convert", "r.jsonl", "o.jsonl"), ("check", "run.yaml", "--json")):
        result = run(*words)
        assert result.exit_code == 1 and "unexpected" not in result.output, result.output
        assert says in result.output and "r.jsonl:2" in result.output
    audit = json.loads(run("data", "audit", "r.jsonl", "--json").stdout)
    [malformed] = [one for one in audit["findings"] if one["code"] == "malformed"]
    assert malformed["items"][0]["places"] == ["r.jsonl:2"]


@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_a_special_token_of_any_model_is_refused(token):
    with pytest.raises(RecordsError, match=r"special token of the model|the image mark"):
        read_records(write_lines(Path("r.jsonl"), messages(f"Is {token} it?", "A")))


UNUSUAL = {
    "nan": float("nan"),
    "inf": -float("inf"),
    "large": 10**4000,
    "deep": deep(40),
    "nul": "\0",
    "esc": "\x1b[1m",
}


def test_unusual_metadata_passes_every_command():
    metadata = UNUSUAL | {"category": float("nan"), "stage": 10**400, "source": deep(30)}
    write_lines(Path("r.jsonl"), ONE | {"metadata": metadata})
    for words in (("convert", "r.jsonl", "out.jsonl"), ("audit", "r.jsonl")):
        result = run("data", *words)
        assert result.exit_code == 0, result.output
    assert json.loads(Path("out.jsonl").read_text())["metadata"]["deep"] == deep(40)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"question": "\ud800"}, HALF),
        ({"note": "\ud800"}, HALF),
        ({"\ud800": 1}, HALF),
        ({"answer": "<|im_end|>"}, "token"),
    ],
    ids=repr,
)
def test_prepare_refuses_what_no_training_could_use(values, says):
    Path("a.jpg").write_bytes(png())
    Path("my.yaml").write_text("name: my\ncolumns: {metadata: {note: note}}\n")
    write_lines(Path("rows.jsonl"), FLAT | values)
    result = run("data", "prepare", "my.yaml", "out", "--source", "rows.jsonl")
    assert result.exit_code == 1 and says in result.output and "rows.jsonl:1" in result.output, result.output


def test_special_tokens_of_the_published_tokenizer_are_refused_and_its_other_added_tokens_are_text(real_processor):
    added = json.loads((real_processor / "tokenizer_config.json").read_text())["added_tokens_decoder"].values()
    assert {token["content"] for token in added if token["special"]} <= {*CONTROL_TOKENS}
    assert not {token["content"] for token in added if not token["special"]} & {*CONTROL_TOKENS}
    write_lines(Path("r.jsonl"), FLAT | {"answer": "<think>It is red.</think>yes"})
    assert run("data", "convert", "r.jsonl", "o.jsonl").exit_code == 0
