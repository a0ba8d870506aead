"""Which images training has seen: by their keys, or by their paths where keys are not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from support.answers import questions, wrong

from lookonce.datasets.formats.record import Record, Turn
from lookonce.report.runs import DataFacts, open_runs, overlap

TRAIN = [Record((Path(f"/train/{number}.jpg"),), (Turn("q", "yes"),)) for number in range(3)]


def test_an_image_that_training_saw_under_another_name_is_found(make_run):
    keys = {record.images[0]: f"key {number}" for number, record in enumerate(TRAIN)}
    facts = DataFacts.of(make_run(), {"train": TRAIN, "val": [], "test": []}, keys)
    found = overlap(wrong(questions(), 15), facts)
    assert found == {"num_questions": 15, "num_images": 3, "exact_match_of_others": 1.0, "by_content": True}
    assert facts.splits["train"].num_images == 3 and "val" not in facts.splits


def test_without_keys_paths_are_compared_and_this_is_said(make_run):
    facts = DataFacts.of(make_run(), {"train": TRAIN}, {})
    rows = [replace(row, images=("/train/1.jpg",)) if place < 2 else row for place, row in enumerate(questions())]
    assert overlap(rows, facts)["num_questions"] == 2 and not overlap(rows, facts)["by_content"]


def test_records_that_are_gone_are_a_line_and_no_error(make_folder, tmp_path):
    folder = make_folder("a", questions())
    (tmp_path / "train.jsonl").unlink()
    assert "no records file" in open_runs([folder])[0].data.problem
