"""References to images, and image marks in texts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.rows import alternating, run, write_lines

from lookonce.datasets.records import read_records

MARKS = [
    *(
        "<|image_1|>",
        "<image_1>",
        "<image 1>",
        "<image1>",
        "<|image|>",
        "<image_placeholder>",
        "<ImageHere>",
        "<IMAGE>",
    ),
    *("<img>", "[IMG]", "[image]", "<image/>", "<start_of_image>", "[Image 1]", "[image_1]", "<image#1>", "< image >"),
    *("<|IMAGE|>", "<boi>", "<img>a.jpg</img>", "[img]a.jpg[/img]", "<image>a.jpg</image>"),
    *("<|vision_start|><|image_pad|><|vision_end|>", "<img><IMG_CONTEXT></img>", "<im_start><im_patch><im_end>"),
    *("<|begin_of_image|>", "<|media_start|>", "<|media_content|>", "<image_soft_token>", "[IMG_BREAK]", "[IMG_END]"),
]
MARKUP = ['<img src="a.jpg">', "![a polyp](a.jpg)"]


def llava(question: str, image: str | list[str] = "", answer: str = "yes") -> dict[str, Any]:
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": said, **({"image": image} if image else {})}


def flat(question: str, image: str, answer: str = "yes") -> dict[str, Any]:
    return {"question": question, "answer": answer, "image": image}


def rows(question: str, image: str = "") -> dict[str, dict[str, Any]]:
    """The same record in each kind of formats, with an image or without."""
    images = {"images": [image] if image else []}
    found = {
        "canonical": {"turns": [{"question": question, "answer": "yes"}], **images},
        "llava": llava(question, image),
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
    "in an answer": (llava("What?", "a.jpg", "It is <image_1>."), "the image mark '<image_1>' in answer 1; name"),
    "in a reference": (
        flat("What?", "a.jpg") | {"references": ["yes", "see <image_1>"]},
        "the image mark '<image_1>' in references",
    ),
    "a token of Qwen": (llava("<|vision_start|>What?", "a.jpg"), "contains <|vision_start|>, a special token"),
    "a video": (llava("<video>\nWhat?", "a.jpg"), "videos are not supported"),
    "HTML without an image": (llava(f"{MARKUP[0]}What?"), "the image mark '<img src="),
    "Markdown without an image": (llava(f"{MARKUP[1]}What?"), "the image mark '![a polyp](a.jpg)' in question 1"),
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


@pytest.mark.parametrize("form", [llava, flat])
@pytest.mark.parametrize(
    "name", ["{}/there/a.jpg", "file://{}/there/a.jpg", "file://localhost{}/there/a.jpg", "/{}/there/a.jpg"]
)
def test_an_absolute_path_is_kept_unless_an_image_root_is_given(tmp_path, form, name):
    path = write_lines(tmp_path / "here" / "train.jsonl", form("Q", name.format(tmp_path)))
    assert read_records(path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert read_records(path, tmp_path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert str(read_records(path, path.parent)[0].images[0]) == f"{path.parent}/../there/a.jpg"
