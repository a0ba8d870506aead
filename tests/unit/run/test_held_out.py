"""The key `data.held_out`: what it does to a run's records, notes and identity."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lookonce.checks.check import check
from lookonce.datasets.records import Context, Record, Turn, write_records
from lookonce.errors import RunFolderError, UsageError
from lookonce.run.config import read_run_file
from lookonce.run.folder import RunFolder
from lookonce.run.open import FROM_CACHE, TO_LOOK, open_run
from lookonce.run.records import HELD_OUT, trained_on
from lookonce.status import find_state


@pytest.fixture
def fold(make_cached_run):
    """Makes runs on the sample that leave out a fold of two."""

    def make(number, **changes):
        return make_cached_run(data={"held_out": {"fold": number, "of": 2}}, **changes)

    return make


def images(opened, split) -> set[str]:
    return {key for record in opened.records[split] for key in opened.images.keys_of(record)}


def test_two_folds_divide_the_training_images_and_leave_the_other_splits(fold, make_cached_run):
    plain, first, second = (open_run(run, FROM_CACHE) for run in (make_cached_run(), fold(1), fold(2)))
    assert first.records["train"] == second.records[HELD_OUT] and second.records["train"] == first.records[HELD_OUT]
    assert images(first, "train").isdisjoint(images(first, HELD_OUT))
    assert images(first, "train") | images(first, HELD_OUT) == images(plain, "train")
    assert [first.records[split] for split in ("val", "test")] == [plain.records[split] for split in ("val", "test")]
    number = len(first.records[HELD_OUT])
    assert first.notes[-1].startswith(f"`data.held_out` leaves out {number} of {len(plain.records['train'])} train rec")
    assert HELD_OUT not in plain.records


def test_paths_with_the_same_bytes_are_in_one_fold(make_run, sample, tmp_path):
    paths = sorted((sample / "images").iterdir())[:4]
    records = []
    for path, name in [(path, f"{copy}-{path.name}") for copy in "ab" for path in paths]:
        (tmp_path / name).write_bytes(path.read_bytes())
        records.append(Record((tmp_path / name,), (Turn("Is there text?", "no"),)))
    write_records(tmp_path / "twice.jsonl", records)
    data = {"train": str(tmp_path / "twice.jsonl"), "val": [], "image_root": None, "held_out": {"fold": 1, "of": 2}}
    found = open_run(make_run(data=data), replace(FROM_CACHE, images="hashed"))
    assert [len(found.records[split]) for split in ("train", HELD_OUT)] == [4, 4]
    assert images(found, "train").isdisjoint(images(found, HELD_OUT))


def test_status_check_and_the_origin_of_answers_know_what_was_trained_on(fold, tmp_path):
    run = fold(1)
    opened = open_run(run, FROM_CACHE)
    assert open_run(run, replace(TO_LOOK, records="used")).records_identity() == opened.records_identity()
    assert find_state(run).notes[0] == opened.notes[-1]
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert opened.notes[-1] in [result.value for result in check(tmp_path / "run.yaml").results]
    answers = tmp_path / "study" / "fold" / "predictions" / "held_out.jsonl"
    RunFolder(answers.parent.parent).claim(run, {})
    answers.parent.mkdir()
    for split in (HELD_OUT, "train"):
        rows = [json.dumps({"image_keys": opened.images.keys_of(record)}) for record in opened.records[split]]
        answers.write_text("\n".join(rows))
        with_context = [replace(record, context=Context(())) for record in opened.records[split]]
        number = len(images(opened, split))
        which = "none of" if split == HELD_OUT else f"{number} of {number} images"
        assert f"trained on {which}" in trained_on(answers, with_context, opened.images)


def test_another_fold_is_another_run(fold):
    run, other = fold(1), fold(2)
    opened = open_run(run, FROM_CACHE)
    folder = RunFolder(run.output)
    folder.claim(run, opened.records_identity())
    folder.log.touch()
    with pytest.raises(RunFolderError, match=r"(?s)inputs.records.train.*run.data.held_out.fold: this run 2, that"):
        folder.check(other, open_run(other, FROM_CACHE).records_identity())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{fold: 3, of: 2}", r"data.held_out: the folds of 2 are 1 to 2 \(got fold 3\)"),
        ("{fold: 1, of: 1}", r"data.held_out.of: .* greater than or equal to 2 \(got 1\)"),
        ("{fold: 1}", "data.held_out.of: is missing"),
    ],
)
def test_wrong_folds_are_refused(tmp_path, value, message):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "output": "x"}))
    with pytest.raises(UsageError, match=message):
        read_run_file(path, [f"data.held_out={value}"])
