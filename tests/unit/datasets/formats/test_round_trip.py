"""Records written in a format are recognised as that format and read back the same, or are refused and not written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import CHARACTERS

from lookonce.datasets.formats.registry import FORMAT_NAMES, FormatName
from lookonce.datasets.records import Record, RecordsFile, Turn, read_records, write_records
from lookonce.errors import RecordsError, UsageError

READ_BACK_THE_SAME = pytest.mark.guarantee(
    "Records written in a format are recognised as that format and read back unchanged, or are refused."
)
AWKWARD = st.sampled_from([*" \n\r\t,;\"'\\\u2028\x85\x0c\0é🩺<", "\r\n", "image>", "[]"])
TEXT = st.lists(AWKWARD | st.text(CHARACTERS, max_size=4), min_size=1, max_size=4).map("".join).filter(str.strip)
NAME = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=12
) | st.sampled_from(["data:image,a", "file:", "iVBORw0KGgo" + "A" * 80, "~", "a b.jpg", "x.parquet", "17", "%20", "#"])
IMAGE = st.lists(NAME.filter(lambda name: name.strip() and name not in (".", "..")), min_size=1, max_size=3).map(
    lambda names: Path(*names)
)
KEY = st.sampled_from(["id", "source", "stage", "é", "a b", "references", "image_id"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(TEXT, children, max_size=3),
    max_leaves=4,
)


def records(
    num_images: tuple[int, int], num_turns: int, metadata: st.SearchStrategy[Any], text: Any = TEXT, system: Any = TEXT
) -> st.SearchStrategy[list[Record]]:
    return st.lists(
        st.builds(
            Record,
            images=st.lists(IMAGE, min_size=num_images[0], max_size=num_images[1]).map(tuple),
            turns=st.lists(st.builds(Turn, text, text), min_size=1, max_size=num_turns).map(tuple),
            system=st.none() | system,
            metadata=st.dictionaries(KEY, metadata, max_size=3),
        ),
        min_size=1,
        max_size=3,
    )


UNTAGGED = TEXT.filter(lambda text: "<image>" not in text)
"""Texts for formats in which `<image>` would be an image tag."""
ANY = records((0, 3), 3, JSON)
CONVERSATION = records((0, 3), 3, JSON, UNTAGGED, UNTAGGED)
FLAT = records((1, 1), 1, JSON, TEXT, st.nothing())
TABLE = records((1, 1), 1, TEXT, TEXT, st.nothing())
COLUMN = records((1, 2), 2, st.lists(TEXT, max_size=2), UNTAGGED, UNTAGGED)
"""Records whose metadata values have one type."""
NUMBERS, NO_SYSTEM = st.integers(0, 9), st.nothing()
JSON_FILES = (".jsonl", ".json")
HELD: dict[str, tuple[st.SearchStrategy[list[Record]], list[tuple[FormatName, str]]]] = {
    "conversations": (CONVERSATION, [(name, suffix) for name in FORMAT_NAMES[2:] for suffix in JSON_FILES]),
    "anything": (ANY, [*product(("parts", "canonical"), JSON_FILES), ("canonical", ".parquet")]),
    "flat": (FLAT, [("flat", ".jsonl"), ("flat", ".json")]),
    "tables": (TABLE, [("flat", ".csv"), ("flat", ".tsv")]),
    "columns": (COLUMN, [("sharegpt", ".parquet"), ("messages", ".parquet"), ("parts", ".parquet")]),
    "flat.parquet": (records((1, 1), 1, NUMBERS, TEXT, NO_SYSTEM), [("flat", ".parquet")]),
    "alpaca.parquet": (records((0, 2), 3, NUMBERS, UNTAGGED, UNTAGGED), [("alpaca", ".parquet")]),
    "llava.parquet": (records((1, 1), 2, TEXT, UNTAGGED, UNTAGGED), [("llava", ".parquet")]),
    "openai.parquet": (records((1, 2), 2, NUMBERS, UNTAGGED, UNTAGGED), [("openai", ".parquet")]),
}
"""Records, and the formats and suffixes of files that hold them."""


@READ_BACK_THE_SAME
@pytest.mark.parametrize(("held", "formats"), HELD.values(), ids=HELD.keys())
def test_records_are_recognised_and_read_back_as_written(tmp_path_factory, held, formats):
    folder = tmp_path_factory.mktemp("round-trip")

    @settings(max_examples=10)
    @given(records=held, is_elsewhere=st.booleans())
    def check(records: list[Record], is_elsewhere: bool) -> None:
        root = folder.parent / "elsewhere" if is_elsewhere else folder
        records = [replace(record, images=tuple(root / image for image in record.images)) for record in records]
        for format, suffix in formats:
            path = folder / f"train{suffix}"
            write_records(path, records, format=format, absolute=True)
            file = RecordsFile(path)
            assert [replace(record, origin="") for record in file] == records, (format, suffix)
            assert file.format == format
            assert list(folder.iterdir()) == [path]
            path.unlink()

    check()


def is_same(found: Record, expected: Record) -> bool:
    return (found.images, found.turns, found.system) == (expected.images, expected.turns, expected.system)


@READ_BACK_THE_SAME
@given(
    records=records((0, 3), 2, JSON, TEXT | st.just("a <image> b"), TEXT | st.just("<image>")),
    keys=st.lists(st.sampled_from(["turns", "images", "image", "messages", "question", "system", "tools", "output"])),
    format=st.sampled_from(FORMAT_NAMES),
    suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]),
)
def test_no_record_is_changed_silently(tmp_path_factory, records, keys, format, suffix):
    folder = tmp_path_factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    path = folder / f"train{suffix}"
    for before in folder.iterdir():
        before.unlink()
    records = [
        replace(
            record,
            images=tuple(folder / image for image in record.images),
            metadata={**record.metadata, **dict.fromkeys(keys, "x")},
        )
        for record in records
    ]
    try:
        write_records(path, records, format=format)
    except (RecordsError, UsageError):
        assert list(folder.iterdir()) == []
    else:
        again = read_records(path)
        assert all(is_same(found, expected) for found, expected in zip(again, records, strict=True))
        if suffix in (".jsonl", ".json"):
            assert [record.metadata for record in again] == [record.metadata for record in records]


ONE = Record((Path("/data/a.jpg"),), (Turn("Q", "A"),))
TWICE, ONE_QUESTION = replace(ONE, turns=ONE.turns * 2), "it holds one question a record, and this one has 2"
TWO, ONE_IMAGE = replace(ONE, images=ONE.images * 2), "it holds one image a record, and this one has"


def answered(text: str) -> Record:
    return replace(ONE, turns=(Turn("Q", text),))


def noted(**metadata: Any) -> Record:
    return replace(ONE, metadata=metadata)


NOT_HELD: dict[str, tuple[Record, FormatName, str, str]] = {
    "turns in flat": (TWICE, "flat", ".jsonl", ONE_QUESTION),
    "turns in CSV": (TWICE, "flat", ".csv", ONE_QUESTION),
    "images in flat": (TWO, "flat", ".csv", f"{ONE_IMAGE} 2"),
    "no image in flat": (replace(ONE, images=()), "flat", ".csv", f"{ONE_IMAGE} 0"),
    "system in flat": (replace(ONE, system="S"), "flat", ".jsonl", "it cannot hold a system text"),
    "a word like a tag": (answered("<image>"), "llava", ".json", "<image> in message 2, of the"),
    "a key of the format": (noted(images=1), "sharegpt", ".json", "its metadata would be read back as {}"),
    "a key of another format": (noted(turns=1), "llava", ".json", "it would be read as the format canonical"),
    "metadata with meaning": (noted(tools=1), "messages", ".json", "it has `tools`; tool calls"),
    "metadata that is not JSON": (noted(a={1}), "llava", ".json", "cannot be written as JSON"),
    "half a character": (answered("\ud800"), "llava", ".json", "cannot be written as JSON in"),
    "an empty system text": (replace(ONE, system=""), "messages", ".json", "system text would be read back as None"),
    "no answer": (answered(""), "canonical", ".jsonl", "`answer` must be text that is not empty"),
}


@READ_BACK_THE_SAME
@pytest.mark.parametrize(("record", "format", "suffix", "expected"), NOT_HELD.values(), ids=NOT_HELD.keys())
def test_a_record_that_a_format_cannot_hold_is_refused_and_named(tmp_path, record, format, suffix, expected):
    path = tmp_path / f"out{suffix}"
    path.write_text("before")
    with pytest.raises(RecordsError) as refusal:
        write_records(path, [ONE, replace(record, origin="train.jsonl:7")], format=format, absolute=True)
    assert str(refusal.value).startswith("train.jsonl:7: ") and expected in str(refusal.value)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_values_of_different_types_cannot_be_a_parquet_column(tmp_path):
    records = [replace(ONE, metadata={"a": value}) for value in (1, "x")]
    for wrong in (records, [replace(ONE, metadata={"a": {}})]):
        with pytest.raises(RecordsError, match="under `a` have different types, .*; write JSONL, or canonical records"):
            write_records(tmp_path / "out.parquet", wrong, format="flat", absolute=True)
    write_records(tmp_path / "out.parquet", records, absolute=True)
    assert [record.metadata["a"] for record in read_records(tmp_path / "out.parquet")] == [1, "x"]


def test_nan_is_written_and_read_back(tmp_path):
    write_records(tmp_path / "out.jsonl", [noted(a=math.nan)], absolute=True)
    assert math.isnan(read_records(tmp_path / "out.jsonl")[0].metadata["a"])


def test_csv_holds_other_values_as_json_and_leaves_empty_ones_out_and_only_the_flat_format(tmp_path):
    values = {"stage": 1, "references": ["a", "b"], "empty": "", "null": None, "yes": True}
    write_records(tmp_path / "out.csv", [noted(**values)], absolute=True)
    [record] = read_records(tmp_path / "out.csv")
    assert record.metadata == {"stage": "1", "references": '["a", "b"]', "yes": "true"}
    with pytest.raises(UsageError, match="CSV holds flat records, not the format llava; write JSONL or parquet"):
        write_records(tmp_path / "out.csv", [ONE], format="llava")


def test_image_tags_are_written_as_llava_itself_does(tmp_path):
    """https://github.com/haotian-liu/LLaVA/blob/main/llava/train/train.py, preprocess_multimodal"""
    write_records(tmp_path / "out.json", [ONE], format="llava", absolute=True)
    [row] = json.loads((tmp_path / "out.json").read_text())
    assert row["image"] == "/data/a.jpg"
    assert row["conversations"] == [{"from": "human", "value": "<image>\nQ"}, {"from": "gpt", "value": "A"}]


@pytest.mark.parametrize("write", [lambda path: path.as_uri(), str], ids=["URL", "path"])
def test_openai_format_writes_urls_and_reads_paths_too(tmp_path, write):
    image = tmp_path / "a b.jpg"
    write_records(tmp_path / "out.jsonl", [replace(ONE, images=(image,))], format="openai")
    text = (tmp_path / "out.jsonl").read_text()
    assert image.as_uri() in text
    (tmp_path / "out.jsonl").write_text(text.replace(image.as_uri(), write(image)))
    assert read_records(tmp_path / "out.jsonl")[0].images == (image,)
