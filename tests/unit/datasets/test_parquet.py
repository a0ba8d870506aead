"""Parquet: rows, image columns, records."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.rows import EMBEDDED, alternating, parts, png, run, write_lines

from lookonce.datasets.images import read_bytes
from lookonce.datasets.parquet import find_image_column, open_parquet, read_rows
from lookonce.datasets.records import RecordsFile, Turn, read_records
from lookonce.errors import RecordsError

NO_PATH = pa.struct([("bytes", pa.large_binary())])
ONLY_PATHS = pa.struct([("bytes", pa.null()), ("path", pa.string())])
NUM_ROWS = 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Five images, each in two rows; the last row has none. Row groups of four rows."""
    images: list[Any] = [{"bytes": f"image {n // 2}".encode(), "path": f"{n // 2}.jpg"} for n in range(NUM_ROWS - 1)]
    table = pa.table({"image": pa.array([*images, None], EMBEDDED), "question": [f"q{n}" for n in range(NUM_ROWS)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    return tmp_path / "a.parquet"


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_rows_come_with_bytes_and_path_of_their_image(path, num_rows):
    with open_parquet(path) as file:
        schema = file.schema_arrow
        rows = list(read_rows(file, schema.names, find_image_column(schema), num_rows))
    assert [row.values for row in rows] == [{"question": f"q{n}"} for n in range(NUM_ROWS)]
    assert [row.image for row in rows] == [*(f"image {n // 2}".encode() for n in range(NUM_ROWS - 1)), None]
    assert [row.image_path for row in rows] == [*(f"{n // 2}.jpg" for n in range(NUM_ROWS - 1)), None]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"a": EMBEDDED}, ("a", "a.bytes", "a.path")),
        ({"a": NO_PATH}, ("a", "a.bytes", None)),
        ({"a": ONLY_PATHS}, ("a", "a.bytes", "a.path")),
        ({"a": pa.binary(), "b": pa.string()}, ("a", "a", None)),
        ({"a": pa.large_binary(), "b": NO_PATH}, ("b", "b.bytes", None)),
        ({"a": EMBEDDED, "image": EMBEDDED}, ("image", "image.bytes", "image.path")),
        ({"a": pa.binary(), "image": pa.binary()}, ("image", "image", None)),
        ({"a": pa.list_(EMBEDDED), "b": pa.struct([("bytes", pa.string())])}, None),
    ],
)
def test_the_image_column_is_found_by_type_and_name(columns, expected):
    assert find_image_column(pa.schema(list(columns.items()))) == expected


def embedded(*data: bytes) -> pa.Array:
    return pa.array([{"bytes": one, "path": f"{number}.png"} for number, one in enumerate(data)], EMBEDDED)


TEXTS = {"question": ["Is it?", "Is it red?"], "answer": ["yes", "no"]}
IMAGES = [png(1), png(2)]
MASKS: dict[str, Any] = {
    "a second struct": embedded(b"mask", b"mask"),
    "plain bytes": pa.array([b"mask", b"mask"]),
    "a list of bytes": pa.array([[b"mask"], []], pa.list_(pa.binary())),
    "bytes in an object": pa.array([{"a": {"b": b"mask"}}, None]),
    "fixed size": pa.array([b"0123456789abcdef"] * 2, pa.binary(16)),
    "a list of structs": pa.array([[{"bytes": b"mask", "path": "a"}], []], pa.list_(EMBEDDED)),
}
COLUMNS: dict[str, dict[str, Any]] = {
    "image": {"image": embedded(*IMAGES)},
    "img": {"img": embedded(*IMAGES)},
    "a plain column": {"image": pa.array(IMAGES)},
    "a path": {"image_path": ["0.png", "1.png"]},
}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with the images as files."""
    for number, data in enumerate(IMAGES):
        (tmp_path / f"{number}.png").write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS.keys())
def test_other_columns_of_bytes_are_named_and_left_out_by_every_command(pictures, mask, columns):
    source = pictures / "two.parquet"
    parquet.write_table(pa.table(columns | TEXTS | {"mask": mask, "source": ["a", "b"]}), source)
    for name in ("out.jsonl", "out.json", "out.csv", "out.parquet"):
        written = run("data", "convert", source, pictures / name)
        assert written.exit_code == 0 and "columns of bytes: mask" in written.stdout, written.output
        records = read_records(pictures / name)
        assert [read_bytes(record.images[0]) for record in records] == IMAGES
        assert [record.metadata for record in records] == [{"source": "a"}, {"source": "b"}]
    [finding] = json.loads(run("data", "audit", source, "--json").stdout)["findings"]
    assert finding["code"] == "columns" and "`mask`" in finding["examples"][0]
    (pictures / "my.yaml").write_text("name: my\n")
    prepared = run("data", "prepare", pictures / "my.yaml", pictures / "o", "--source", source, "--json")
    assert prepared.exit_code == 0 and "mask" in json.loads(prepared.stdout)["columns_left_out"], prepared.output
    assert ".tmp-" not in written.output + prepared.output


QUESTIONS, ANSWERS = ("question", "query", "problem", "prompt"), ("answer", "answers", "label", "response", "solution")
NAMES = ("image", "image_filename", "file_name", "filename", "image_path", "img", "img_path", "img_id", "image_id")


@pytest.mark.parametrize("image", NAMES)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_the_usual_names_of_columns_are_known_to_convert_and_prepare_and_init(tmp_path, monkeypatch, image, kind):
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    Path("images/a.png").write_bytes(png())
    value = "a" if image.endswith("_id") else "images/a.png"
    for number, (question, answer) in enumerate(zip(cycle(QUESTIONS), ANSWERS)):
        row = {image: value, question: "Is it?", answer: "yes", "source": "s"}
        table = f"{','.join(row)}\n{','.join(row.values())}\n"
        Path(f"{number}.{kind}").write_text({"jsonl": json.dumps(row), "json": json.dumps([row]), "csv": table}[kind])
        result = run("data", "convert", f"{number}.{kind}", f"out-{number}.jsonl")
        assert result.exit_code == 0, (row, result.output)
        [record] = read_records(Path(f"out-{number}.jsonl"))
        assert (record.images, record.turns) == ((tmp_path / "images/a.png",), (Turn("Is it?", "yes"),))
        assert record.metadata == {"source": "s"} | ({image: "a"} if image.endswith("_id") else {})
    Path("my.yaml").write_text("name: my\n")
    prepared = run("data", "prepare", "my.yaml", "prepared", "--source", f"{number}.{kind}")
    assert prepared.exit_code == 0, prepared.output
    assert read_records(Path("prepared/train.jsonl"))[0].turns == (Turn("Is it?", "yes"),)
    assert run("init", "run.yaml", "--model", "none/none", "--train", f"{number}.{kind}", "--yes").exit_code == 0


def test_a_list_of_answers_has_the_most_frequent_one_first_and_all_as_references(tmp_path):
    rows = [{"image": "a.png", "question": "Q", "answers": answers} for answers in (["b", "a", "a"], ["x"], [3, 3, 2])]
    words = ("data", "convert", write_lines(tmp_path / "r.jsonl", *rows), tmp_path / "o.jsonl")
    assert "put it into quotes" in run(*words).stderr and run(*words, "--coerce-answers").exit_code == 0
    found = [(one.turns[0].answer, one.references) for one in read_records(tmp_path / "o.jsonl")]
    assert found == [("a", ("a", "b")), ("x", ()), ("3", ("3", "2"))]


STRUCTS = pa.list_(EMBEDDED)
LISTS: dict[str, dict[str, Any]] = {
    name: {name: pa.array([[{"bytes": IMAGES[0]}], [{"bytes": one} for one in IMAGES]], STRUCTS)}
    for name in ("images", "image")
} | {"plain bytes": {"images": pa.array([IMAGES[:1], IMAGES])}, "paths": {"image": [["0.png"], ["0.png", "1.png"]]}}
CHAT = [{"from": "human", "value": "<image>Is it?"}, {"from": "gpt", "value": "yes"}]


@pytest.mark.parametrize("images", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("masks", [{"mask": embedded(b"mask", b"mask")}, {}], ids=["a mask", ""])
def test_a_list_of_images_is_all_images_of_the_question(pictures, images, masks):
    parquet.write_table(pa.table(masks | images | TEXTS), pictures / "r.parquet")
    written = run("data", "convert", pictures / "r.parquet", pictures / "o.jsonl")
    assert written.exit_code == 0 and ("columns of bytes: mask" in written.stdout) == bool(masks), written.output
    found = [[read_bytes(image) for image in record.images] for record in read_records(pictures / "o.jsonl")]
    assert found == [IMAGES[:1], IMAGES]


def test_a_mask_beside_the_list_of_images_of_a_conversation_is_left_out(tmp_path):
    images = pa.array([[{"bytes": one}] for one in IMAGES], STRUCTS)
    columns = {"images": images, "mask": embedded(b"mask", b"mask"), "conversations": [CHAT, CHAT]}
    parquet.write_table(pa.table(columns), tmp_path / "r.parquet")
    assert run("data", "convert", tmp_path / "r.parquet", tmp_path / "o.jsonl").exit_code == 0
    assert [read_bytes(one.images[0]) for one in read_records(tmp_path / "o.jsonl")] == IMAGES


def test_a_name_twice_and_questions_in_bytes_and_empty_images_are_named(tmp_path):
    names = ["image", "question", "answer", "answer"]
    parquet.write_table(pa.table([pa.array(["a.png"])] * 4, names=names), tmp_path / "r.parquet")
    result = run("data", "convert", tmp_path / "r.parquet", tmp_path / "o.jsonl")
    assert result.exit_code == 1 and "two columns are called `answer`; rename one of them" in result.stderr
    columns = {"image": ["a.png"], "question": [b"Is it?"], "answer": ["yes"]}
    parquet.write_table(pa.table(columns), tmp_path / "r.parquet")
    result = run("data", "convert", tmp_path / "r.parquet", tmp_path / "o.jsonl")
    assert result.exit_code == 1 and "the column `question` holds bytes; expected texts" in result.stderr
    for empty in (None, "", [], {}):
        (tmp_path / "r.jsonl").write_text(json.dumps({"image": empty, "question": "Q", "answer": "a"}))
        result = run("data", "convert", tmp_path / "r.jsonl", tmp_path / "o.jsonl")
        assert result.exit_code == 1 and "`image` is empty" in result.stderr


TURN = (Turn("Is there text?", "yes"),)


def write(path: Path, types: dict[str, Any] | None = None, **columns: list[Any]) -> Path:
    arrays = {name: pa.array(values, (types or {}).get(name)) for name, values in columns.items()}
    parquet.write_table(pa.table(arrays), path, row_group_size=2)
    return path


def questions(number: int) -> dict[str, list[str]]:
    return {"question": ["Is there text?"] * number, "answer": ["yes"] * number}


def test_embedded_images_have_the_path_of_their_row_and_named_ones_are_beside_the_file(tmp_path):
    images = [{"bytes": f"image {n}".encode(), "path": "a.jpg"} for n in range(3)]
    columns = {"image": images, "source": ["polyps", "polyps", None], **questions(3)}
    path = write(tmp_path / "raw.parquet", {"image": EMBEDDED}, **columns)
    records = read_records(path, tmp_path / "elsewhere")  # whatever the image root
    assert [record.images for record in records] == [(path / str(n),) for n in range(3)]
    assert [read_bytes(record.images[0]) for record in records] == [image["bytes"] for image in images]
    assert records[0].metadata == {"source": "polyps"} and records[2].metadata == {}
    assert records[1].origin == f"{path}: row 1" and records[1].turns == TURN
    path = write(tmp_path / "raw.parquet", {"picture": pa.binary()}, picture=[b"x", b"y"], **questions(2))
    assert [read_bytes(record.images[0]) for record in read_records(path)] == [b"x", b"y"]
    image = [{"bytes": None, "path": "images/a.jpg"}]
    path = write(tmp_path / "raw.parquet", {"picture": EMBEDDED}, picture=image, **questions(1))
    assert read_records(path)[0].images == (tmp_path / "images" / "a.jpg",)


def test_each_row_has_its_own_image_where_the_first_one_has_no_bytes(tmp_path):
    images = [None, {"bytes": b"x", "path": "a.jpg"}, {"bytes": b"y", "path": None}, {"bytes": None, "path": "a.jpg"}]
    for first in range(4):
        some = [*images[first:], *images[:first]]
        path = write(tmp_path / "raw.parquet", {"image": EMBEDDED}, image=some, messages=[alternating("q", "a")] * 4)
        if first in (1, 2):  # a first row with bytes stands for all others: what has none cannot be read
            assert {record.images for record in read_records(path)} == {(path / str(n),) for n in range(4)}
            continue
        found = dict(zip(range(4), (record.images for record in read_records(path)), strict=True))
        expected = [(), (path / str((1 - first) % 4),), (path / str((2 - first) % 4),), (tmp_path / "a.jpg",)]
        assert [found[(n - first) % 4] for n in range(4)] == expected


ASKED, YES = "<image>Is there text?", "yes"
MESSAGES: dict[str, Any] = {
    "messages": [alternating(ASKED, YES)],
    "parts": [alternating([{"type": "image", "text": None}, *parts("Is there text?")], parts(YES))],
    "conversations": [[{"from": "human", "value": ASKED}, {"from": "gpt", "value": YES}]],
}


@pytest.mark.parametrize("format", MESSAGES)
def test_conversations_in_columns_have_the_embedded_image(tmp_path, format):
    columns = {"messages" if format == "parts" else format: MESSAGES[format]}
    path = write(tmp_path / "x.parquet", {"image": EMBEDDED}, image=[{"bytes": b"x", "path": None}], **columns)
    [record] = read_records(path)
    assert (record.images, record.turns) == ((path / "0",), TURN)


def test_lists_of_embedded_images_are_refused_with_the_command_that_extracts_them(tmp_path):
    """The columns of the datasets of TRL and LLaMA-Factory."""
    images = [[{"bytes": b"x", "path": None}, {"bytes": b"y", "path": None}]]
    messages = [alternating("Is there text?", "yes")]
    path = write(tmp_path / "x.parquet", {"images": pa.list_(EMBEDDED)}, images=images, messages=messages)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}: row 0: the image is embedded in the record")
    assert f"lookonce data convert {path} OUT.jsonl" in str(refusal.value)
    [record] = RecordsFile(path, keep=lambda data: tmp_path / data.decode())
    assert record.images == (tmp_path / "x", tmp_path / "y")


def test_nulls_are_missing_keys_and_times_are_texts(tmp_path):
    stamp = pa.array([0], pa.timestamp("s"))
    table = {"image_filename": pa.array(["a.jpg"]), "a": pa.array([None], pa.string()), "t": stamp}
    parquet.write_table(pa.table(table | {k: pa.array(v) for k, v in questions(1).items()}), tmp_path / "x.parquet")
    assert read_records(tmp_path / "x.parquet")[0].metadata == {"t": "1970-01-01 00:00:00"}


def test_a_parquet_file_is_recognised_by_its_content_and_refused_if_damaged(tmp_path):
    path = write(tmp_path / "x.parquet", image_filename=["a.jpg"] * 3, **questions(3))
    assert read_records(path.rename(tmp_path / "x.data"))[0].turns == TURN
    path.write_bytes((tmp_path / "x.data").read_bytes()[:-20])
    with pytest.raises(RecordsError, match="cannot read .*x.parquet: .*; is it complete"):
        read_records(path)


def test_an_embedded_image_takes_precedence_over_a_file_name(tmp_path):
    image, name = [{"bytes": b"x", "path": None}], ["frame-1.jpg"]
    path = write(tmp_path / "x.parquet", {"image": EMBEDDED}, file_name=name, image=image, **questions(1))
    [record] = read_records(path)
    assert (record.images, record.metadata) == ((path / "0",), {"file_name": "frame-1.jpg"})
    with pytest.raises(RecordsError, match="its images can only be read if its name ends in .parquet; rename it"):
        read_records(path.rename(tmp_path / "x.data"))


def test_two_columns_of_images_are_refused_with_their_names(tmp_path):
    images = {name: [{"bytes": b"x", "path": None}] for name in ("before", "after")}
    path = write(tmp_path / "x.parquet", dict.fromkeys(images, EMBEDDED), **images, **questions(1))
    with pytest.raises(RecordsError, match=r"x.parquet: expected one image column .*'before', 'after'"):
        read_records(path)
