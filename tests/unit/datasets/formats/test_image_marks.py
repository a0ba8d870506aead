"""References to images, and image marks in texts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lookonce.cli import main
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
STANDING = {
    **{
        name: name for name in ("<|image_1|>", "<image_1>", "<image 1>", "<image1>", "<|image|>", "<image_placeholder>")
    },
    **{name: name for name in ("<ImageHere>", "<IMAGE>", "<img>", "[IMG]", "[image]", "<image/>", "<start_of_image>")},
    "Qwen's tokens": "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>",
    "InternVL": "<img><IMG_CONTEXT><IMG_CONTEXT></img>",
    **{name: name for name in ("[Image 1]", "[image_1]", "<image#1>", "< image >", "<image >", "<|IMAGE|>", "<boi>")},
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


def rows(question: str, answer: str = "yes", image: str = "") -> dict[str, dict[str, Any]]:
    """The same record in each kind of formats, with an image or without."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    said = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    images = {"images": [image] if image else []}
    found = {
        "canonical": {"turns": [{"question": question, "answer": answer}], **images},
        "llava": {"conversations": said, **({"image": image} if image else {})},
        "messages": {"messages": messages, **images},
        "alpaca": {"instruction": question, "output": answer, **images},
    }
    return found | ({"flat": {"question": question, "answer": answer, "image": image}} if image else {})


@pytest.fixture
def convert(tmp_path: Path):
    def convert(row: dict[str, Any]) -> Result:
        (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
        return CliRunner().invoke(
            main, ["data", "convert", str(tmp_path / "r.jsonl"), str(tmp_path / "out.jsonl"), "--overwrite"]
        )

    return convert


def only_record(folder: Path) -> tuple[list[str], str]:
    found = json.loads((folder / "out.jsonl").read_text())
    return found["images"], found["turns"][0]["question"]


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS.keys())
@pytest.mark.parametrize("question", ["{}What?", "What?\n{}"], ids=["before", "after"])
def test_as_many_marks_as_images_are_read_in_every_format(convert, tmp_path, mark, question):
    for format, row in rows(question.format(mark), image="a b.jpg").items():
        result = convert(row)
        assert result.exit_code == 0, (format, result.stderr)
        assert only_record(tmp_path) == (["a b.jpg"], "What?"), format


@pytest.mark.parametrize("mark", NAMING.values(), ids=NAMING.keys())
def test_a_mark_that_names_a_file_is_an_image(convert, tmp_path, mark):
    for format, row in rows(f"{mark}What?").items():
        assert convert(row).exit_code == 0 and only_record(tmp_path) == (["a b.jpg"], "What?"), format


def test_several_marks_are_several_images(convert, tmp_path):
    two = "Picture 1: <img>a.jpg</img>\nPicture 2: <img>b.jpg</img>\nDo they differ?"
    assert convert(rows(two)["llava"]).exit_code == 0
    assert only_record(tmp_path) == (["a.jpg", "b.jpg"], "Do they differ?")
    for numbers in ((0, 1), (1, 2)):
        marks = "".join(f"<image_{number}>" for number in numbers)
        assert convert(rows(f"{marks}\nDo they differ?")["llava"] | {"image": ["a.jpg", "b.jpg"]}).exit_code == 0
        assert only_record(tmp_path) == (["a.jpg", "b.jpg"], "Do they differ?")


ORDER, SEVERAL = "expected the numbers of the marks in the order of the images", "<img>a.jpg</img><img>b.jpg</img>What?"
REFUSED = {
    "other numbers": ("<image_2>What?", "yes", "a.jpg", ORDER),
    "too many": (SEVERAL, "yes", "a.jpg", "2 image marks and 1 image; expected one mark for each"),
    "another image": ("<img>b.jpg</img>What?", "yes", "a.jpg", "names another image than the record, which has"),
    "one of two names a file": ("<img>b.jpg</img><image_1>What?", "yes", "", "of which only one names a file"),
    "on the network": ("![](https://example.org/a.jpg)\nWhat?", "yes", "", "is not on this machine; download it"),
    "in an answer": ("What?", "It is <image_1>.", "a.jpg", "the image mark '<image_1>' in answer 1; lookonce shows"),
    "only an end": ("<|image_end|><|image_end|>What?", "yes", "a.jpg", "2 image marks and 1 image"),
    "an own token of Qwen alone": (
        "<|vision_start|>What?",
        "yes",
        "a.jpg",
        "contains <|vision_start|>, a special token",
    ),
    "nothing but a mark": ("<img>a.jpg</img>", "yes", "", "`question` must be text that is not empty"),
}
for name, mark in MARKS.items():
    REFUSED[f"{name} in the middle"] = (f"Is {mark} a polyp?", "yes", "", "in the middle of the first question")
for name, mark in STANDING.items():
    REFUSED[f"{name} without an image"] = (f"{mark}What?", "yes", "", "1 image mark and 0 images; expected one mark")


@pytest.mark.parametrize(("question", "answer", "image", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_other_marks_are_refused_by_name_in_every_command(convert, tmp_path, question, answer, image, says):
    result = convert(rows(question, answer, image)["llava"])
    assert result.exit_code == 1 and says in result.stderr and "r.jsonl:1: " in result.stderr
    audit = CliRunner().invoke(main, ["data", "audit", str(tmp_path / "r.jsonl"), "--strict", "--json"])
    assert audit.exit_code == 1 and says in json.loads(audit.stdout)["findings"][0]["items"][0]["reason"]


def test_a_mark_in_a_reference_is_refused(convert):
    row = rows("What?", image="a.jpg")["flat"] | {"references": ["yes", "see <image_1>"]}
    assert "the image mark '<image_1>' in references" in convert(row).stderr


def test_videos_are_refused(convert):
    for tag, says in (("<video>", "videos are not supported"), ("<audio>", "audio is not supported")):
        assert says in convert(rows(f"{tag}\nWhat?", image="a.jpg")["llava"]).stderr


@pytest.mark.parametrize("mark", ['<img src="logo.png">', "![logo](logo.png)"])
def test_html_and_markdown_may_be_the_text_of_an_answer_or_beside_an_image(convert, tmp_path, mark):
    assert convert(rows("Write it as HTML.", mark, "a.jpg")["flat"]).exit_code == 0
    assert convert(rows(f"What does {mark} show?", image="a.jpg")["flat"]).exit_code == 0
    assert only_record(tmp_path) == (["a.jpg"], f"What does {mark} show?")
    audit = CliRunner().invoke(main, ["data", "audit", str(tmp_path / "r.jsonl"), "--json"])
    assert "image-marks" in {finding["code"] for finding in json.loads(audit.stdout)["findings"]}


@pytest.mark.parametrize(
    "part",
    [
        "![",
        "![a](",
        "<img ",
        "<img>",
        "[img]",
        "<image>",
        "Picture 1: ",
        "<img src=",
        "<im_start>",
        "<boi><image>",
        "\n ",
        " ",
    ],
)
def test_long_texts_take_linear_time(convert, part):
    start = time.perf_counter()
    for format in ("canonical", "llava"):
        convert(rows(f"What? {part * (100_000 // len(part))} x <image>", image="a.jpg")[format])
    assert time.perf_counter() - start < 3


def write(folder: Path, row: dict[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


def llava(image: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": "Is there text?"}, {"from": "gpt", "value": "yes"}]
    return {"image": image, "conversations": turns}


def flat(image: str) -> dict[str, Any]:
    return {"image_filename": image, "question": "Q", "answer": "A"}


@pytest.mark.parametrize("row", [llava, flat])
@pytest.mark.parametrize(
    "name", ["{}/there/a.jpg", "file://{}/there/a.jpg", "file://localhost{}/there/a.jpg", "/{}/there/a.jpg"]
)
def test_an_absolute_path_is_kept_unless_an_image_root_is_given(tmp_path, row, name):
    records = tmp_path / "here"
    records.mkdir()
    path = write(records, row(name.format(tmp_path)))
    assert read_records(path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert read_records(path, tmp_path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert str(read_records(path, records)[0].images[0]) == f"{records}/../there/a.jpg"


def test_a_relative_path_cannot_leave_the_folder_even_where_an_absolute_one_may(tmp_path):
    records = tmp_path / "here"
    records.mkdir()
    [record] = read_records(write(records, llava("../there/a.jpg")))
    assert str(record.images[0]) == f"{records}/../there/a.jpg"
