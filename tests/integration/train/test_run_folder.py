"""A training and its run folder: what is written, trained again, kept and reported."""

from __future__ import annotations

import json

import pytest

from lookonce.run.log_file import read_curves
from lookonce.run.open import TO_BUILD, open_run
from lookonce.run.startup import OTHER
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}
pytestmark = pytest.mark.usefixtures("no_fsync")


def test_a_finished_run_is_trained_again_by_restart_alone_which_keeps_the_old_one(make_cached_run, trainings):
    notes: list[str] = []
    run = make_cached_run(train={"steps": 2})
    first, before = train(run, notify=notes.append), trainings.adapter(run)
    written = (run.output / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    assert train(run, resume=True, notify=notes.append) == first and "is already trained" in notes[-1]
    assert (run.output / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns == written
    train(run, restart=True, **QUIET)
    assert json.loads((run.output.with_name("run.old-1") / "summary.json").read_text())["num_steps"] == 2
    assert all((before[name] == weight).all() for name, weight in trainings.adapter(run).items())


def test_checkpoints_and_log_follow_the_run_file(make_cached_run):
    run = make_cached_run(train={"steps": 6, "save_steps": 1, "logging_steps": 2})
    train(run, **QUIET)
    assert sorted(path.name for path in (run.output / "checkpoints").iterdir()) == ["checkpoint-5", "checkpoint-6"]
    lines = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 4, 6]
    assert all(
        {"grad_norm", "samples_per_second", "tokens_per_second", "eta_seconds", "wait_share", "time"} <= set(line)
        for line in lines
        if "loss" in line
    )


def test_a_run_keeps_its_curves_its_best_validation_loss_and_the_seconds_of_its_start(make_cached_run):
    notes: list[str] = []
    run = make_cached_run(train={"steps": 4, "save_steps": 2, "eval_steps": 1})
    summary = train(run, notify=notes.append)
    curves = read_curves(run.output / "log.jsonl")
    assert list(curves.validation_loss) == [1, 2, 3, 4] and len(curves.loss) == 4
    assert (summary.best_validation_step, summary.best_validation_loss) == curves.best
    said = [note.partition(":")[0] for note in notes]
    assert [name for name in summary.startup_seconds if name not in said] == [OTHER]
    assert any(note.startswith("first step after ") for note in notes)
    assert {"read records", "make tokens of train records", "load weights"} <= set(summary.startup_seconds)


def test_rounded_features_in_a_float32_training_are_reported(make_run):
    notes: list[str] = []
    run = make_run(train={"steps": 1}, cache={"dtype": "bfloat16"})
    open_run(run, TO_BUILD).build()
    train(run, notify=notes.append)
    assert any("stored in bfloat16" in note for note in notes)
