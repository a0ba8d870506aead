"""What is refused in record formats as a record is read, and references to images and image marks in texts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
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


MARKS = [
    *"<|image_1|> <image_1> <image1> <|image|> <image_placeholder> <ImageHere> <IMAGE> <img> [IMG] [image]".split(),
    *"<image/> <start_of_image> [image_1] <image#1> <|IMAGE|> <boi> <img>a.jpg</img> [img]a.jpg[/img]".split(),
    *"<image>a.jpg</image> <|vision_start|><|image_pad|><|vision_end|> <img><IMG_CONTEXT></img>".split(),
    *"<im_start><im_patch><im_end> <|begin_of_image|> <|media_start|> <|media_content|> <image_soft_token>".split(),
    *("[IMG_BREAK]", "[IMG_END]", "<image 1>", "[Image 1]", "< image >"),
]
MARKUP = ['<img src="a.jpg">', "![a polyp](a.jpg)"]


def shown(question: str, image: str | list[str] = "", answer: str = "yes") -> dict[str, Any]:
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": said, **({"image": image} if image else {})}


def flat(question: str, image: str, answer: str = "yes") -> dict[str, Any]:
    return {"question": question, "answer": answer, "image": image}


def rows(question: str, image: str = "") -> dict[str, dict[str, Any]]:
    """The same record in each kind of formats, with an image or without."""
    images = {"images": [image] if image else []}
    found = {
        "canonical": {"turns": [{"question": question, "answer": "yes"}], **images},
        "llava": shown(question, image),
        "messages": {"messages": alternating(question, "yes"), **images},
        "alpaca": {"instruction": question, "output": "yes", **images},
    }
    return found | ({"flat": flat(question, image)} if image else {})


@pytest.fixture
def convert(tmp_path: Path) -> Callable[[dict[str, Any]], Result]:
    words, target = ("data", "convert"), tmp_path / "out.jsonl"
    return lambda row: run(*words, write_lines(tmp_path / "r.jsonl", row), target, "--overwrite")


def only_record(folder: Path) -> tuple[list[str], str]:
    found = json.loads((folder / "out.jsonl").read_text())
    return found["images"], found["turns"][0]["question"]


@pytest.mark.parametrize("mark", MARKS)
def test_a_mark_of_another_program_is_refused_in_every_format(convert, mark):
    for format, row in rows(f"{mark}What?", "a.jpg").items():
        result = convert(row)
        assert result.exit_code == 1 and "r.jsonl:1: the image mark" in result.stderr, (format, result.stderr)
        assert "in question 1; name the images of the record under its key for images, and remove" in result.stderr


REFUSED = {
    "in an answer": (shown("What?", "a.jpg", "It is <image_1>."), "the image mark '<image_1>' in answer 1; name"),
    "in a reference": (
        flat("What?", "a.jpg") | {"references": ["yes", "see <image_1>"]},
        "the image mark '<image_1>' in references",
    ),
    "a token of Qwen": (shown("<|vision_start|>What?", "a.jpg"), "contains <|vision_start|>, a special token"),
    "a video": (shown("<video>\nWhat?", "a.jpg"), "videos are not supported"),
    "HTML without an image": (shown(f"{MARKUP[0]}What?"), "the image mark '<img src="),
    "Markdown without an image": (shown(f"{MARKUP[1]}What?"), "the image mark '![a polyp](a.jpg)' in question 1"),
}


@pytest.mark.parametrize(("row", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_other_marks_are_refused_by_name(convert, tmp_path, row, says):
    result = convert(row)
    assert result.exit_code == 1 and says in result.stderr and "r.jsonl:1: " in result.stderr
    audit = run("data", "audit", tmp_path / "r.jsonl", "--strict", "--json")
    assert audit.exit_code == 1 and says in json.loads(audit.stdout)["findings"][0]["items"][0]["reason"]


@pytest.mark.parametrize("mark", MARKUP)
def test_html_and_markdown_may_be_the_text_of_an_answer_or_beside_an_image(convert, tmp_path, mark):
    assert convert(flat("Write it as HTML.", "a.jpg", mark)).exit_code == 0
    assert convert(flat(f"What does {mark} show?", "a.jpg")).exit_code == 0
    assert only_record(tmp_path) == (["a.jpg"], f"What does {mark} show?")
    audit = run("data", "audit", tmp_path / "r.jsonl", "--json")
    assert "image-marks" in {finding["code"] for finding in json.loads(audit.stdout)["findings"]}


@pytest.mark.parametrize("text", ["What is [a] <b>?", "<images>", "an [imaging] <imago>", "a < image", "<im>"])
def test_other_brackets_are_text(convert, tmp_path, text):
    assert convert(flat(text, "a.jpg")).exit_code == 0
    assert only_record(tmp_path) == (["a.jpg"], text)


@pytest.mark.parametrize("part", ["![", "![a](", "<img ", "<image", "[img", "<image>", "< ", " "])
def test_long_texts_take_linear_time(convert, part):
    start = time.perf_counter()
    for format in ("canonical", "llava"):
        convert(rows(f"What? {part * (100_000 // len(part))} x <image>", "a.jpg")[format])
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize("form", [shown, flat])
@pytest.mark.parametrize(
    "name", ["{}/there/a.jpg", "file://{}/there/a.jpg", "file://localhost{}/there/a.jpg", "/{}/there/a.jpg"]
)
def test_an_absolute_path_is_kept_unless_an_image_root_is_given(tmp_path, form, name):
    path = write_lines(tmp_path / "here" / "train.jsonl", form("Q", name.format(tmp_path)))
    assert read_records(path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert read_records(path, tmp_path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert str(read_records(path, path.parent)[0].images[0]) == f"{path.parent}/../there/a.jpg"
