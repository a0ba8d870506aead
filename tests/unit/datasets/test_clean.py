"""Cleaning leaves out what an audit calls broken, reports all of it, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from support.rows import encoded, run

from lookonce.datasets.audit.audit import audit
from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.records import read_records
from lookonce.datasets.rewrite import clean
from lookonce.errors import RecordsError, UsageError

GOOD = b'{"image_filename": "a.png",   "question":"Where?", "answer": "l\\u00e0" , "stage": 1}\r\n'
ALSO_GOOD = '{"turns": [{"question": "Où ?", "answer": "là"}], "images": ["b.png"]}\n'.encode()
NUMBER = b'{"image_filename": "a.png", "question": "How many?", "answer": 3}\n'


def line(image: str) -> bytes:
    return json.dumps({"image_filename": image, "question": "Where?", "answer": "here"}).encode() + b"\n"


NOISE = encoded(Image.effect_noise((48, 40), 90), "PNG")


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A file with good lines, malformed ones, and lines of images that are missing, truncated and no image."""
    images = {"a.png": NOISE, "b.png": NOISE, "cut.png": NOISE[: len(NOISE) // 2], "text.png": b"not an image"}
    for name, content in images.items():
        (tmp_path / name).write_bytes(content)
    lines = [GOOD, b"{\n", line("cut.png"), b"\n", ALSO_GOOD, line("nowhere.png"), NUMBER, line("text.png"), b"[]\n"]
    (tmp_path / "train.jsonl").write_bytes(b"".join(lines) + GOOD.rstrip())
    return tmp_path / "train.jsonl"


def test_lines_that_are_kept_have_their_bytes_and_the_report_names_all_others(records):
    report = clean(records, records.with_name("out.jsonl"))
    assert report.target.read_bytes() == GOOD + ALSO_GOOD + GOOD.rstrip()
    assert (report.num_records, report.num_kept, report.num_malformed, report.left_out.num_left_out) == (9, 3, 3, 3)
    assert [len(kind.places) for kind in report.malformed] == [1, 1, 1]
    assert {image.path.name: image.places for image in report.left_out.images} == {
        f"{name}.png": (f"{records}:{line}",) for name, line in (("cut", 3), ("nowhere", 6), ("text", 8))
    }
    text = report.text()
    assert "3 malformed records, 3 records of 3 unusable images" in text and "3 records, unchanged" in text
    for words in ("nowhere.png: No such file", "not JSON (", "got 3; put it into quotes", f"({records}:3)"):
        assert words in text


def test_what_is_written_has_no_errors_in_an_audit(records):
    clean(records, records.with_name("out.jsonl"))
    before, after = (audit(Corpus.read([path], decode=True)) for path in (records, records.with_name("out.jsonl")))
    assert before.count("error") == 3
    assert [finding.code for finding in after.findings if finding.level == "error"] == []


@pytest.mark.parametrize("name", ["out.json", "out.parquet", "sub/out.json"])
def test_other_files_are_written_in_the_canonical_format(records, name):
    report = clean(records, records.parent / name)
    kept = read_records(records.parent / name)
    assert not report.is_unchanged and [record.turns[0].answer for record in kept] == ["là"] * 3
    assert {record.images[0] for record in kept} == {records.parent / "a.png", records.parent / "b.png"}


def test_numbers_are_kept_as_they_are_if_a_run_coerces_them(records):
    report = clean(records, records.with_name("out.jsonl"), coerce_answers=True)
    assert NUMBER in report.target.read_bytes() and report.num_malformed == 2
    clean(records, records.with_name("out.json"), coerce_answers=True)
    assert [record.turns[0].answer for record in read_records(records.with_name("out.json"))][2] == "3"


def test_headers_alone_miss_truncated_images(records):
    report = clean(records, records.with_name("out.jsonl"), decode=False)
    assert [image.path.name for image in report.left_out.images] == ["nowhere.png", "text.png"]


def test_an_existing_file_is_replaced_only_if_asked(records):
    target = records.with_name("out.jsonl")
    target.write_text("mine")
    with pytest.raises(UsageError, match="exists; name another file, or replace it with --overwrite"):
        clean(records, target)
    assert target.read_text() == "mine"
    clean(records, target, overwrite=True)
    assert target.read_bytes().startswith(GOOD)
    with pytest.raises(UsageError, match="is also the file to read"):
        clean(records, records, overwrite=True)


def test_lines_are_not_moved_to_where_their_image_paths_lead_elsewhere(records):
    target = records.parent / "sub" / "out.jsonl"
    with pytest.raises(UsageError, match="image paths in .* are relative to its folder"):
        clean(records, target)
    assert not target.exists()
    clean(records, target, records.parent)
    assert read_records(target, records.parent)[0].images == (records.parent / "a.png",)


def test_a_file_without_usable_records_is_refused_with_the_report(records):
    records.write_bytes(line("nowhere.png") + b"{\n")
    with pytest.raises(RecordsError, match="has no record that can be used") as refusal:
        clean(records, records.with_name("out.jsonl"))
    assert "nowhere.png: No such file" in str(refusal.value) and not records.with_name("out.jsonl").exists()


def test_the_command_prints_the_report(records):
    value = json.loads(run("data", "clean", records, records.with_name("out.jsonl"), "--json").stdout)
    assert (value["num_kept"], value["num_malformed"], value["num_with_unusable_images"]) == (3, 3, 3)
    assert [image["places"] for image in value["images"]] == [[f"{records}:{line}"] for line in (3, 6, 8)]
