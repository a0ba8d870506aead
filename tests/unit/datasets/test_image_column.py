"""Columns of tables: the usual names are known to every command, and columns of bytes beside the image are left out."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from pyarrow import parquet

from lookonce.cli import main
from lookonce.datasets.images import read_bytes
from lookonce.datasets.records import read_records

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def picture(number: int = 0) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (40, 40), (number, 0, 0)).save(target, "PNG")
    return target.getvalue()


def embedded(*data: bytes) -> pa.Array:
    return pa.array([{"bytes": one, "path": f"{number}.png"} for number, one in enumerate(data)], EMBEDDED)


TEXTS = {"question": ["Is it?", "Is it red?"], "answer": ["yes", "no"]}
IMAGES = [picture(1), picture(2)]
MASKS: dict[str, Any] = {
    "a second struct": embedded(b"mask", b"mask"),
    "plain bytes": pa.array([b"mask", b"mask"]),
    "a list of bytes": pa.array([[b"mask"], []], pa.list_(pa.binary())),
    "bytes in an object": pa.array([{"a": {"b": b"mask"}}, None]),
    "fixed size": pa.array([b"0123456789abcdef"] * 2, pa.binary(16)),
    "a list of structs": pa.array([[{"bytes": b"mask", "path": "a"}], []], pa.list_(EMBEDDED)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("image", ["image", "img", "a plain column", "a path"])
def test_other_columns_of_bytes_are_named_and_left_out_by_every_command(tmp_path, mask, image):
    columns: dict[str, Any] = {"image": embedded(*IMAGES)}
    if image == "img":
        columns = {"img": embedded(*IMAGES)}
    elif image == "a plain column":
        columns = {"image": pa.array(IMAGES)}
    elif image == "a path":
        columns = {"image_path": ["0.png", "1.png"]}
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.png").write_bytes(data)
    parquet.write_table(pa.table(columns | TEXTS | {"mask": mask, "source": ["a", "b"]}), tmp_path / "two.parquet")
    for name in ("out.jsonl", "out.json", "out.csv", "out.parquet"):
        written = run("data", "convert", tmp_path / "two.parquet", tmp_path / name)
        assert written.exit_code == 0 and "columns of bytes: mask" in written.stdout, written.output
        records = read_records(tmp_path / name)
        assert [read_bytes(record.images[0]) for record in records] == IMAGES
        assert [record.metadata for record in records] == [{"source": "a"}, {"source": "b"}]
    cleaned = run("data", "clean", tmp_path / "two.parquet", tmp_path / "clean.jsonl", "--json")
    assert cleaned.exit_code == 0 and json.loads(cleaned.stdout)["left_out_columns"] == ["mask"]
    tarred = run("data", "tar", tmp_path / "two.parquet", tmp_path / "tars")
    assert tarred.exit_code == 0 and "left out `mask`, which hold bytes" in tarred.stdout, tarred.output
    audit = json.loads(run("data", "audit", tmp_path / "two.parquet", "--json").stdout)
    assert [one["code"] for one in audit["findings"]] == ["columns"] and "`mask`" in audit["findings"][0]["examples"][0]
    (tmp_path / "my.yaml").write_text("name: my\n")
    prepared = run(
        "data", "prepare", tmp_path / "my.yaml", tmp_path / "o", "--source", tmp_path / "two.parquet", "--json"
    )
    assert prepared.exit_code == 0, prepared.output
    assert "mask" in json.loads(prepared.stdout)["columns_left_out"]
    assert ".tmp-" not in written.output + cleaned.output + tarred.output + prepared.output


QUESTIONS, ANSWERS = ("question", "query", "problem", "prompt"), ("answer", "answers", "label", "response", "solution")
NAMES = ("image", "image_filename", "file_name", "filename", "image_path", "img", "img_path", "img_id", "image_id")


@pytest.mark.parametrize("image", NAMES)
@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_the_usual_names_of_columns_are_known_to_convert_and_prepare_and_init(tmp_path, monkeypatch, image, kind):
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    Path("images/a.png").write_bytes(picture())
    value = "a" if image.endswith("_id") else "images/a.png"
    for number, (question, answer) in enumerate((q, a) for q in QUESTIONS for a in ANSWERS):
        row = {image: value, question: "Is it?", answer: "yes", "source": "s"}
        texts = {
            "jsonl": json.dumps(row),
            "json": json.dumps([row]),
            "csv": f"{','.join(row)}\n{','.join(row.values())}\n",
        }
        Path(f"{number}.{kind}").write_text(texts[kind])
        result = run("data", "convert", f"{number}.{kind}", f"out-{number}.jsonl")
        assert result.exit_code == 0, (row, result.output)
        [record] = read_records(Path(f"out-{number}.jsonl"))
        assert (record.images[0], record.turns[0].question, record.turns[0].answer) == (
            *(tmp_path / "images/a.png", "Is it?", "yes"),
        )
        assert record.metadata == {"source": "s"} | ({image: "a"} if image.endswith("_id") else {})
    Path("my.yaml").write_text("name: my\n")
    prepared = run("data", "prepare", "my.yaml", "prepared", "--source", f"{number}.{kind}")
    assert prepared.exit_code == 0, prepared.output
    [record] = read_records(Path("prepared/train.jsonl"))
    assert (record.turns[0].question, record.turns[0].answer) == ("Is it?", "yes")
    assert run("init", "run.yaml", "--model", "none/none", "--train", f"{number}.{kind}", "--yes").exit_code == 0


def test_a_list_of_answers_has_the_most_frequent_one_first_and_all_as_references(tmp_path):
    rows = [{"image": "a.png", "question": "Q", "answers": answers} for answers in (["b", "a", "a"], ["x"], [3, 3, 2])]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "put it into quotes" in run("data", "convert", tmp_path / "r.jsonl", tmp_path / "o.jsonl").stderr
    assert run("data", "convert", tmp_path / "r.jsonl", tmp_path / "o.jsonl", "--coerce-answers").exit_code == 0
    found = [(one.turns[0].answer, one.references) for one in read_records(tmp_path / "o.jsonl")]
    assert found == [("a", ("a", "b")), ("x", ()), ("3", ("3", "2"))]


@pytest.mark.parametrize(
    "row", [{"answers": []}, {"answers": [{"answer": "a"}]}, {"answer": ["a"]}, {"img": "", "answer": "a"}]
)
def test_what_is_not_plain_is_refused_by_name(tmp_path, row):
    (tmp_path / "r.jsonl").write_text(json.dumps({"question": "Q", "img": "a"} | row))
    result = run("data", "convert", tmp_path / "r.jsonl", tmp_path / "o.jsonl")
    assert result.exit_code == 1 and any(f"`{name}`" in result.stderr for name in [*row, "image_filename"])


STRUCTS = pa.list_(EMBEDDED)
LISTS: dict[str, dict[str, Any]] = {
    "images": {"images": pa.array([[{"bytes": IMAGES[0]}], [{"bytes": one} for one in IMAGES]], STRUCTS)},
    "image": {"image": pa.array([[{"bytes": IMAGES[0]}], [{"bytes": one} for one in IMAGES]], STRUCTS)},
    "plain bytes": {"images": pa.array([IMAGES[:1], IMAGES])},
    "paths": {"image": [["0.png"], ["0.png", "1.png"]]},
}
CHAT = [{"from": "human", "value": "<image>Is it?"}, {"from": "gpt", "value": "yes"}]


@pytest.mark.parametrize("images", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("mask", ["a mask", ""])
def test_a_list_of_images_is_all_images_of_the_question(tmp_path, images, mask):
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.png").write_bytes(data)
    masks = {"mask": embedded(b"mask", b"mask")} if mask else {}
    parquet.write_table(pa.table(masks | images | TEXTS), tmp_path / "r.parquet")
    written = run("data", "convert", tmp_path / "r.parquet", tmp_path / "o.jsonl")
    assert written.exit_code == 0 and ("columns of bytes: mask" in written.stdout) == bool(mask), written.output
    found = [[read_bytes(image) for image in record.images] for record in read_records(tmp_path / "o.jsonl")]
    assert found == [IMAGES[:1], IMAGES]


def test_a_mask_beside_the_list_of_images_of_a_conversation_is_left_out(tmp_path):
    images = pa.array([[{"bytes": one}] for one in IMAGES], STRUCTS)
    columns = {"images": images, "mask": embedded(b"mask", b"mask"), "conversations": [CHAT, CHAT]}
    parquet.write_table(pa.table(columns), tmp_path / "r.parquet")
    assert run("data", "convert", tmp_path / "r.parquet", tmp_path / "o.jsonl").exit_code == 0
    assert [read_bytes(one.images[0]) for one in read_records(tmp_path / "o.jsonl")] == IMAGES


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["image", "question", "answer", "answer"], "two columns are called `answer`; rename one of them"),
        (["Image", "Question", "Answer", "note"], "rename `Question` to `question`, `Answer` to `answer`"),
    ],
)
def test_names_of_columns_are_refused_with_what_to_rename(tmp_path, names, says):
    parquet.write_table(pa.table([pa.array(["a.png"])] * 4, names=names), tmp_path / "r.parquet")
    result = run("data", "convert", tmp_path / "r.parquet", tmp_path / "o.jsonl")
    assert result.exit_code == 1 and says in result.stderr.replace("`Image` to `image`, ", ""), result.output


def test_questions_in_bytes_and_empty_images_are_named(tmp_path):
    columns = {"image": ["a.png"], "question": [b"Is it?"], "answer": ["yes"]}
    parquet.write_table(pa.table(columns), tmp_path / "r.parquet")
    result = run("data", "convert", tmp_path / "r.parquet", tmp_path / "o.jsonl")
    assert result.exit_code == 1 and "the column `question` holds bytes; expected texts" in result.stderr
    for empty in (None, "", [], {}):
        (tmp_path / "r.jsonl").write_text(json.dumps({"image": empty, "question": "Q", "answer": "a"}))
        result = run("data", "convert", tmp_path / "r.jsonl", tmp_path / "o.jsonl")
        assert result.exit_code == 1 and "`image` is empty" in result.stderr
