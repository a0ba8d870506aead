"""Preparing a dataset: every row is in a record or counted; what the command prints, and how it refuses mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from support.rows import EMBEDDED, jpeg_of, run, write_lines

from lookonce.datasets.prepare import sources
from lookonce.datasets.prepare.run import Options, prepare
from lookonce.datasets.records import Record, read_records
from lookonce.errors import ImageError, SourceError, UsageError
from lookonce.run.config import RunFile

QUESTIONS = ["Is there text?", "How many instrumnets are in the image?", "What type of polyp is present?", "none"]
ANSWERS = ["yes", "lower-rigth;center", "nan", "none", "", "paris ip", "paris is", ">20"]


def records_of(folder: Path) -> dict[str, list[Record]]:
    return {path.stem: read_records(path) for path in sorted(folder.glob("*.jsonl"))}


def is_complete(report: dict) -> bool:
    """Whether all rows that were read are records, or left out for one reason."""
    rows = report["rows"]
    return rows["read"] == rows["records"] + sum(rows["left_out"].values())


def test_a_prepared_dataset_has_records_images_and_a_report(tmp_path, made):
    report = made().report
    names = ["images", "report.json", "test.jsonl", "train.jsonl", "val.jsonl"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    left_out = {"no question or no answer": 24, "the same as another row": 3}
    assert report["rows"] == {"read": 60, "records": 11 * 2 + 11, "left_out": left_out}
    assert {tally["name"]: tally["changed"] for tally in report["rules"]}["typos in questions"] == 12
    assert report["images"] == {"written": 11, "names": 12, "in_no_record": 0, "with_several_names": 1, "not_found": {}}
    assert is_complete(report)
    written = records_of(tmp_path / "out")
    assert {part: len(records) for part, records in written.items()} == report["split"]["records"]
    sides: dict[bytes, set[str]] = {}  # images of the same bytes are one file and on one side
    for part, records in written.items():
        for record in records:
            sides.setdefault(record.images[0].read_bytes(), set()).add(part)
    assert len(sides) == 11 and all(len(found) == 1 for found in sides.values())
    assert not (tmp_path / "out" / "images" / "cl1.jpg").exists()


def test_two_images_with_one_name_are_two_files_for_any_name(tmp_path, made):
    names = ["a", "a", "A", "../a", "b.jpg", "é/ü", "." * 9, "x" * 300]
    of_all = {"question": [f"q{number}" for number in range(8)], "answer": ["x"] * 8, "img_id": names}
    table = pa.table({"image": [jpeg_of(number) for number in range(8)], **of_all})
    parquet.write_table(table, tmp_path / "a.parquet")
    written = records_of(made(source=tmp_path / "a.parquet").folder).values()
    found = {record.turns[0].question: record.images[0] for records in written for record in records}
    expected = {f"q{number}": jpeg_of(number) for number in range(len(names))}
    assert {question: path.read_bytes() for question, path in found.items()} == expected
    assert {path.parent for path in found.values()} == {tmp_path / "out" / "images"}
    assert len({path.name.lower() for path in found.values()}) == len(names)
    assert found["q0"].name == "a.jpg" and found["q4"].name == "b.jpg"


ROW = st.fixed_dictionaries(
    {"question": st.sampled_from(QUESTIONS), "answer": st.sampled_from(ANSWERS), "img_id": st.sampled_from("abcd")}
)


@pytest.mark.guarantee("Every row of a dataset is in a record or counted.")
@settings(max_examples=25)
@given(
    rows=st.lists(ROW, min_size=1, max_size=25),
    policy=st.sampled_from(["merge", "keep", "drop"]),
    split=st.sampled_from(["image", "official"]),
)
def test_every_row_is_in_a_record_or_counted(tmp_path_factory, rows, policy, split):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "in" / "images").mkdir(parents=True)
    for name in "abc":  # d is missing
        (folder / "in" / "images" / f"{name}.jpg").write_bytes(jpeg_of("c" if name == "b" else name))
    for part in ("train", "test", "raw"):
        mine = [row for row in rows if {"a": "train", "d": "raw"}.get(row["img_id"], "test") == part]
        write_lines(folder / "in" / f"{part}.jsonl", *mine)
    options = Options(str(folder / "in"), split=split, duplicates=policy)
    try:
        report = prepare("kvasir-vqa", folder / "out", options).report
    except (ImageError, SourceError):
        assert all("none" in row["question"] or row["answer"] in ("", "nan") or row["img_id"] == "d" for row in rows)
        return
    assert report["rows"]["read"] == len(rows) and is_complete(report)
    assert report["duplicates"]["policy"] == policy
    assert sum(map(len, records_of(folder / "out").values())) == report["rows"]["records"]


def test_lists_of_images_decide_the_split_and_the_rest_is_counted(tmp_path, made):
    lists = {"train": [f"cl{number}" for number in range(2, 8)], "test": ["cl8.jpg", "cl9"]}
    (tmp_path / "ids.json").write_text(json.dumps(lists))
    report = made(split=str(tmp_path / "ids.json")).report
    assert report["split"]["images"] == {"train": 6, "val": 0, "test": 2} and is_complete(report)
    assert report["rows"]["left_out"]["in no part of the split"] == 4 * 3
    assert not (tmp_path / "out" / "val.jsonl").exists()


def test_splits_that_are_impossible_are_refused(tmp_path, made):
    path = tmp_path / "ids.json"
    for text, message in {
        "no json": "is neither `image` nor `official` nor a JSON file",
        '{"training": []}': 'expected one like {"train"',
        '{"train": [1]}': 'expected one like {"train"',
        '{"train": ["a"], "val": ["a"]}': "has image a in two parts",
        '{"train": ["a"]}': "no image of kvasir-vqa is in the lists of --split; expected names like cl0, cl1, cl10",
    }.items():
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            made(split=str(path))
    with pytest.raises(UsageError, match="--split image draws a split"):
        made(split="official")


def test_rules_that_leave_nothing_are_an_error(tmp_path, source):
    (tmp_path / "mine.yaml").write_text("name: mine\nrules: [{name: all, rule: keep_rows, metadata: x, values: [y]}]")
    with pytest.raises(SourceError, match="the rules of mine leave out all 60 rows"):
        prepare(str(tmp_path / "mine.yaml"), tmp_path / "out", Options(str(source)))


def test_a_repeated_image_is_hashed_and_written_once(tmp_path, made, monkeypatch):
    hashed, written = [], []
    key, write = sources.bytes_key, sources._write
    monkeypatch.setattr(sources, "bytes_key", lambda data: (hashed.append(data), key(data))[1])
    monkeypatch.setattr(sources, "_write", lambda path, data: (written.append(path), write(path, data))[1])
    made()
    assert len(hashed) <= 12 + 4 and len(written) == 11  # the first image of a file may be the last of the one before


def test_memory_does_not_grow_with_the_images(tmp_path, made, monkeypatch):
    schema = pa.schema([("image", EMBEDDED), *((name, pa.string()) for name in ("question", "answer", "img_id"))])
    with parquet.ParquetWriter(tmp_path / "a.parquet", schema, compression="none") as writer:
        for number in range(60):
            image = {"bytes": os.urandom(200_000), "path": None}
            rows = [{"image": image, "question": str(q), "answer": "a", "img_id": str(number)} for q in range(2)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    before, peaks, add = pa.total_allocated_bytes(), [], sources.ImageStore.add

    def watch(self, data, stem):
        peaks.append(pa.total_allocated_bytes() - before)
        return add(self, data, stem)

    monkeypatch.setattr(sources.ImageStore, "add", watch)
    made(source=tmp_path / "a.parquet")
    assert len(peaks) == 120 and max(peaks) < 8_000_000


def test_the_command_prints_licence_table_and_next_steps_and_names_a_cut_report(tmp_path, source):
    words = ("data", "prepare", "kvasir-vqa", tmp_path / "out", "--source", source)
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    assert "CC BY-NC 4.0" in result.stdout and "typos in questions" in result.stdout
    assert f"lookonce data audit {tmp_path / 'out'}/*.jsonl" in result.stderr
    data = yaml.safe_load(result.stderr.partition("data:\n")[2])
    RunFile.model_validate({"model": {"path": "m"}, "data": data, "output": "o"})
    assert all(read_records(Path(path)) for path in data.values())
    again = run(*words)
    assert again.stdout == result.stdout and "is already prepared" in again.stderr
    (tmp_path / "out" / "report.json").write_text("")
    result = run(*words)
    assert result.exit_code == 2 and "report.json is damaged, or of another program" in result.stderr
