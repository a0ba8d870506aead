"""Answers to held-out questions: given when a training ends, again by `lookonce eval`, and never to other records."""

from __future__ import annotations

import shutil

import pytest

from lookonce.errors import RunFolderError, UsageError
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import read_predictions
from lookonce.run.folder import RunFolder
from lookonce.run.records import HELD_OUT
from lookonce.workflow import train


def test_held_out_questions_are_answered_when_training_ends_and_only_while_the_records_are_the_same(
    trainings, make_run, tmp_path
):
    options = trainings.options("shared", steps=1)
    records = tmp_path / "records.jsonl"
    shutil.copy(options["data"]["train"], records)
    options["data"] |= {"train": str(records), "held_out": {"fold": 1, "of": 2}}
    run = make_run(**options)
    train(run, notify=lambda note: None)
    folder = RunFolder(run.output)
    first = folder.predictions(HELD_OUT).read_bytes()
    assert 0 < len(read_predictions(folder.predictions(HELD_OUT))) < len(records.read_text().splitlines())
    assert len(read_predictions(folder.predictions("val"))) == trainings.num_validated
    evaluate_run(run.output, HELD_OUT)
    assert folder.predictions(HELD_OUT).read_bytes() == first
    (folder.folder / "summary.json").unlink()  # as if it had been killed while it answered
    notes = []
    train(run, resume=True, notify=notes.append)
    assert f"the answers of {HELD_OUT} are on disk" in notes

    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[len(lines) // 2 :]))
    with pytest.raises(RunFolderError, match=r"have changed since training \(records.train\)"):
        evaluate_run(run.output, HELD_OUT)
    evaluate_run(run.output, "val")

    with pytest.raises(UsageError, match="no held-out records: `data.held_out` leaves no training record out"):
        evaluate_run(trainings.uninterrupted("shared").output, HELD_OUT)
