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

NAMING = {
    "Qwen-VL": "Picture 1: <img>a b.jpg</img>\n",
    "Qwen-VL without a label": "<img>a b.jpg</img>",
    "a closed tag": "<image>a b.jpg</image>",
    "BBCode": "[img]a b.jpg[/img]",
    "Markdown": "![a polyp](<a b.jpg>) ",
    "Markdown with a title": '![](a%20b.jpg "a polyp")\n',
    "HTML": '<img alt="x" src="a%20b.jpg" width=9/>\n',
    "HTML in other quotes": "<IMG SRC='a b.jpg'>\n",
}
NAMED_BY_THEMSELVES = [
    *("<|image_1|>", "<image_1>", "<image 1>", "<image1>", "<|image|>", "<image_placeholder>", "<ImageHere>"),
    *("<IMAGE>", "<img>", "[IMG]", "[image]", "<image/>", "<start_of_image>", "[Image 1]", "[image_1]", "<image#1>"),
    *("< image >", "<image >", "<|IMAGE|>", "<boi>"),
]
STANDING = {name: name for name in NAMED_BY_THEMSELVES} | {
    "Qwen's tokens": "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>",
    "InternVL": "<img><IMG_CONTEXT><IMG_CONTEXT></img>",
    "MiniGPT-4": "<Img><ImageHere></Img>",
    "LLaVA's start and end": "<im_start><im_patch><im_patch><im_end>",
    "GLM-4V": "<|begin_of_image|><|image|><|end_of_image|>",
    "Janus": "<begin_of_image><image_placeholder><image_placeholder><end_of_image>",
    "Gemma 3": "<start_of_image><image_soft_token><image_soft_token><end_of_image>",
    "Kimi-VL": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
    "Pixtral": "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]",
    "MiniCPM-V": "(<image>./</image>)\n",
    "Qwen-VL without a name": "Picture 1: <img></img>\n",
}
MARKS = NAMING | STANDING


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


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS.keys())
@pytest.mark.parametrize("question", ["{}What?", "What?\n{}"], ids=["before", "after"])
def test_as_many_marks_as_images_are_read_in_every_format(convert, tmp_path, mark, question):
    for format, row in rows(question.format(mark), "a b.jpg").items():
        result = convert(row)
        assert result.exit_code == 0, (format, result.stderr)
        assert only_record(tmp_path) == (["a b.jpg"], "What?"), format


@pytest.mark.parametrize("mark", NAMING.values(), ids=NAMING.keys())
def test_a_mark_that_names_a_file_is_an_image(convert, tmp_path, mark):
    for format, row in rows(f"{mark}What?").items():
        assert convert(row).exit_code == 0 and only_record(tmp_path) == (["a b.jpg"], "What?"), format


@pytest.mark.parametrize(
    ("marks", "image"),
    [
        ("Picture 1: <img>a.jpg</img>\nPicture 2: <img>b.jpg</img>", ""),
        ("<image_0><image_1>", ["a.jpg", "b.jpg"]),
        ("<image_1><image_2>", ["a.jpg", "b.jpg"]),
    ],
)
def test_several_marks_are_several_images(convert, tmp_path, marks, image):
    assert convert(llava(f"{marks}\nDo they differ?", image)).exit_code == 0
    assert only_record(tmp_path) == (["a.jpg", "b.jpg"], "Do they differ?")


ORDER, SEVERAL = "expected the numbers of the marks in the order of the images", "<img>a.jpg</img><img>b.jpg</img>What?"
REFUSED = {
    "other numbers": (llava("<image_2>What?", "a.jpg"), ORDER),
    "too many": (llava(SEVERAL, "a.jpg"), "2 image marks and 1 image; expected one mark for each"),
    "another image": (
        llava("<img>b.jpg</img>What?", "a.jpg"),
        "names another image than the record, which has",
    ),
    "one of two names a file": (llava("<img>b.jpg</img><image_1>What?"), "of which only one names a file"),
    "on the network": (llava("![](https://example.org/a.jpg)\nWhat?"), "is not on this machine; download it"),
    "in an answer": (
        llava("What?", "a.jpg", "It is <image_1>."),
        "the image mark '<image_1>' in answer 1; lookonce shows",
    ),
    "in a reference": (
        flat("What?", "a.jpg") | {"references": ["yes", "see <image_1>"]},
        "the image mark '<image_1>' in references",
    ),
    "only an end": (llava("<|image_end|><|image_end|>What?", "a.jpg"), "2 image marks and 1 image"),
    "a token of Qwen": (llava("<|vision_start|>What?", "a.jpg"), "contains <|vision_start|>, a special token"),
    "nothing but a mark": (llava("<img>a.jpg</img>"), "`question` must be text that is not empty"),
    "a video": (llava("<video>\nWhat?", "a.jpg"), "videos are not supported"),
    "audio": (llava("<audio>\nWhat?", "a.jpg"), "audio is not supported"),
}
for name, mark in MARKS.items():
    REFUSED[f"{name} in the middle"] = (llava(f"Is {mark} a polyp?"), "in the middle of the first question")
for name, mark in STANDING.items():
    REFUSED[f"{name} without an image"] = (llava(f"{mark}What?"), "1 image mark and 0 images; expected one mark")


@pytest.mark.parametrize(("row", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_other_marks_are_refused_by_name_in_every_command(convert, tmp_path, row, says):
    result = convert(row)
    assert result.exit_code == 1 and says in result.stderr and "r.jsonl:1: " in result.stderr
    audit = run("data", "audit", tmp_path / "r.jsonl", "--strict", "--json")
    assert audit.exit_code == 1 and says in json.loads(audit.stdout)["findings"][0]["items"][0]["reason"]


@pytest.mark.parametrize("mark", ['<img src="logo.png">', "![logo](logo.png)"])
def test_html_and_markdown_may_be_the_text_of_an_answer_or_beside_an_image(convert, tmp_path, mark):
    assert convert(flat("Write it as HTML.", "a.jpg", mark)).exit_code == 0
    assert convert(flat(f"What does {mark} show?", "a.jpg")).exit_code == 0
    assert only_record(tmp_path) == (["a.jpg"], f"What does {mark} show?")
    audit = run("data", "audit", tmp_path / "r.jsonl", "--json")
    assert "image-marks" in {finding["code"] for finding in json.loads(audit.stdout)["findings"]}


PARTS = ["![", "![a](", "<img ", "<img>", "[img]", "<image>", "Picture 1: ", "<img src=", "<im_start>", "<boi><image>"]


@pytest.mark.parametrize("part", [*PARTS, "\n ", " "])
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


def test_a_relative_path_cannot_leave_the_folder_even_where_an_absolute_one_may(tmp_path):
    [record] = read_records(write_lines(tmp_path / "here" / "train.jsonl", llava("Q", "../there/a.jpg")))
    assert str(record.images[0]) == f"{tmp_path}/here/../there/a.jpg"
