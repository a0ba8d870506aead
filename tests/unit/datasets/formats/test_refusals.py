"""What a record format cannot express is refused, with file, line and reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import read_records
from lookonce.errors import RecordsError

USER, ANSWER = {"role": "user", "content": "Is there text?"}, {"role": "assistant", "content": "yes"}
HUMAN, GPT = {"from": "human", "value": "<image>\nIs there text?"}, {"from": "gpt", "value": "yes"}


def write(folder: Path, row: dict[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


def alternating(*contents: Any) -> list[dict[str, Any]]:
    """Alternating messages of user and assistant."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def parts(*contents: str | None) -> list[dict[str, str]]:
    """Text parts, and an image part for each None."""
    return [{"type": "image", "path": "a.jpg"} if c is None else {"type": "text", "text": c} for c in contents]


def llava(question: Any = HUMAN["value"], *more: Any, **values: Any) -> dict[str, Any]:
    return {"image": "a.jpg", "conversations": [HUMAN | {"value": question}, GPT, *more]} | values


def in_parts(image: dict[str, Any]) -> dict[str, Any]:
    return {"messages": alternating([image, *parts("Q")], "A")}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "tag in the middle": (llava("Is <image> a polyp?"), "<image> in the middle of the first question; lookonce shows"),
    "tag in a later turn": (
        llava(HUMAN["value"], HUMAN | {"value": "<image>And this?"}, GPT, image=["a.jpg", "b.jpg"]),
        "<image> in message 3, of the user; lookonce shows images before the first question; move it there",
    ),
    "tag in an answer": (
        llava("Q", {"from": "human", "value": "A"}, GPT | {"value": "<image>"}),
        "in message 4, of the a",
    ),
    "tag in the system text": (
        {"conversations": [{"from": "system", "value": "<image>"}, HUMAN, GPT], "image": "a.jpg"},
        "<image> in message 1, of the system",
    ),
    "fewer tags": (llava(image=["a.jpg", "b.jpg"]), "1 <image> tag and 2 images; expected one tag for each image"),
    "a tag and no image": (
        llava(image=None),
        "1 <image> tag and 0 images; expected one tag for each image, or",
    ),
    "nothing but a tag": (llava("<image>\n"), "`question` must be text that is not empty, got ''"),
    "two images keys": (llava(images=["b.jpg"]), "both `image` and `images` have a value; expected one of"),
    "two questions": (llava("Q", HUMAN | {"value": "R"}), "the last question has no answer"),
    "question after question": (
        {"conversations": [HUMAN, HUMAN, GPT], "image": "a.jpg"},
        "<image> in message 2, of the user",
    ),
    "answer after answer": (llava("Q", GPT), "message 3 has the role assistant; expected a question of the user"),
    "answer first": ({"conversations": [GPT]}, "message 1 has the role assistant; expected a question of the user"),
    "no answer": ({"conversations": [HUMAN], "image": "a.jpg"}, "the last question has no answer; training needs one"),
    "no messages": ({"conversations": []}, "it has no messages; expected at least one question and answer"),
    "tool call": (
        llava("Q", {"from": "function_call", "value": "{}"}),
        "'function_call'; tool calls are not supported",
    ),
    "unknown speaker": (
        llava("Q", {"from": "bard", "value": "A"}),
        "message 3 has the role 'bard'; expected one of system, user",
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
    "a message without loss": ({"messages": [USER, ANSWER | {"loss": False}]}, "message 2 has `loss`"),
    "tools": ({"messages": [USER, ANSWER], "tools": [{}]}, "it has `tools`; tool calls are not supported"),
    "video": (llava(video="a.mp4"), "it has `video`; videos are not supported"),
    "boxes": ({"messages": [USER, ANSWER], "objects": {"bbox": [[1]]}}, "it has `objects`"),
    "image part in the middle": (
        {"messages": alternating(parts("Is", None, "a polyp?"), "yes")},
        "an image in the middle of message 1",
    ),
    "image part in a later turn": (
        {"messages": alternating(parts("Q"), "A", parts(None, "Q"), "A")},
        "an image in message 3, of the user",
    ),
    "image part in an answer": (
        {"messages": alternating(parts("Q"), parts(None, "A"))},
        "an image in message 2, of the assist",
    ),
    "image part without a reference": (
        {"messages": alternating([{"type": "image"}], "A")},
        "1 image parts have no reference of their own, and `images` has 0",
    ),
    "images without a part": (
        {"messages": alternating(parts(None, "Q"), "A"), "images": ["b.jpg"]},
        "0 image parts have no reference",
    ),
    "wrong index": (
        {"messages": alternating([{"type": "image", "index": 1}, *parts("Q")], "A"), "images": ["a.jpg"]},
        "image part 0 has the index 1; expected them in order",
    ),
    "audio part": (
        {"messages": alternating([{"type": "audio", "path": "a"}], "A")},
        "has a part that is an object with ['path', 'type'], of type 'audio'; expected one of type text",
    ),
    "image part with a size": (
        {"messages": alternating([{"type": "image", "path": "a.jpg", "max_pixels": 9}, *parts("Q")], "A")},
        "message 1 has a part with `max_pixels`, which would be lost",
    ),
    **{
        f"the size of one image, {name}": (
            row,
            f"`{key}`, which would be lost, since all images of a run have the same",
        )
        for name, key, row in (
            ("of Qwen's part", "min_pixels", in_parts({"type": "image", "image": "a.jpg", "min_pixels": 9})),
            (
                "of Qwen's part as height",
                "resized_height",
                in_parts({"type": "image", "image": "a", "resized_height": 9}),
            ),
            ("of a part's object", "max_pixels", in_parts({"type": "image", "image": {"path": "a", "max_pixels": 9}})),
            ("of OpenAI's part", "max_pixels", in_parts({"type": "image_url", "image_url": "a", "max_pixels": 9})),
            (
                "of OpenAI's URL",
                "max_pixels",
                in_parts({"type": "image_url", "image_url": {"url": "a", "max_pixels": 9}}),
            ),
            ("of a message", "max_pixels", {"messages": [USER | {"max_pixels": 9}, ANSWER], "images": ["a.jpg"]}),
            ("under images", "min_pixels", {"messages": [USER, ANSWER], "images": [{"path": "a", "min_pixels": 9}]}),
            ("beside messages", "max_pixels", {"messages": [USER, ANSWER], "images": ["a.jpg"], "max_pixels": 9}),
            ("of a flat record", "max_pixels", {"image": "a", "question": "Q", "answer": "A", "max_pixels": 9}),
            (
                "in a flat record",
                "max_pixels",
                {"image": {"path": "a", "max_pixels": 9}, "question": "Q", "answer": "A"},
            ),
            ("in LLaVA's", "resized_width", llava(image={"path": "a", "resized_width": 9})),
        )
    },
    "content of a wrong type": (
        {"messages": [USER | {"content": 3}, ANSWER]},
        "`question` must be text that is not empty, got 3",
    ),
    "message of a wrong type": ({"messages": ["Q"]}, "message 1 must be an object with ['role', 'content'], got 'Q'"),
    "messages of a wrong type": ({"messages": "Q"}, "`messages` must be a list, got 'Q'"),
    "instruction empty": ({"instruction": "", "output": "A"}, "`instruction` must be text that is not empty, got ''"),
    "history of a wrong type": (
        {"instruction": "Q", "output": "A", "history": [["Q"]]},
        "`history` must be pairs of a ques",
    ),
    "http": (
        llava(image="https://example.org/a.jpg"),
        "is not on this machine; download it and use its path: a training",
    ),
    "bucket": (llava(image="s3://frames/a.jpg"), "is not on this machine; download it and use its path"),
    "another machine": (llava(image="file://there/a.jpg"), "names another machine; expected file:///path/to/a.jpg"),
    "data URL": (llava(image="data:image/png;base64,AAAA"), "extract them with: lookonce data convert"),
    "bytes": (llava(image={"bytes": "AAAA"}), "the image is embedded in the record"),
    "base64": (llava(image="iVBORw0KGgo" + "A" * 89), "the image is embedded in the record"),
    "data URL cut short": (llava(image="data:image/png;base64"), "is not a complete data: URL; it has no comma"),
    "another machine, half named": (
        llava(image="file://[there/a.jpg"),
        "names another machine; expected file:///path/to/a.jpg",
    ),
    "image of a wrong type": (
        llava(image={"name": "a.jpg"}),
        "an image must have `bytes` or `path`, got an object with ['n",
    ),
    "half a character": (llava("<image>\ud800?"), "`question` holds half a character (a lone surrogate)"),
    "image by an id": (
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
