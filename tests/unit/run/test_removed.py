"""Keys of earlier versions: refused in run files, ignored in recorded runs; and what replaced them."""

from __future__ import annotations

import json

import pytest

from lookonce.errors import UsageError
from lookonce.run.config import read_run_file
from lookonce.run.folder import HARMLESS, RunFolder
from lookonce.run.sections.train import TrainSection


def test_a_run_file_with_a_removed_key_is_refused_with_its_replacement(make_run, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(make_run().to_yaml())
    with pytest.raises(UsageError, match=r"`train.tensorboard` no longer exists; .* `train.track`: \[tensorboard\]"):
        read_run_file(path, ["train.tensorboard=true"])


def test_a_run_that_was_recorded_with_it_is_readable_and_the_same_run(make_run, tmp_path):
    run = make_run()
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.log.touch()
    record = run.output / "run.json"
    values = json.loads(record.read_text())
    del values["run"]["train"]["track"]
    values["run"]["train"]["tensorboard"] = True
    record.write_text(json.dumps(values))
    assert folder.read_run().train.track == []
    folder.check(run, {})


def test_a_key_without_a_replacement_is_unknown_in_run_files_and_left_out_of_recorded_runs(make_run, tmp_path):
    run = make_run()
    path = tmp_path / "run.yaml"
    path.write_text(run.to_yaml())
    with pytest.raises(UsageError, match="eval.candidates: unknown key"):
        read_run_file(path, ["eval.candidates=training"])
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.log.touch()
    record = run.output / "run.json"
    values = json.loads(record.read_text())
    for recorded in (None, "training", "/data/known.yaml"):
        values["run"]["eval"]["candidates"] = recorded
        record.write_text(json.dumps(values))
        assert folder.read_run().eval == run.eval
        folder.check(run, {})


def test_the_removed_choice_of_the_best_checkpoint_means_the_same_in_a_recorded_run(make_run, tmp_path):
    run = make_run(train={"best": "loss"})
    path = tmp_path / "run.yaml"
    path.write_text(run.to_yaml())
    with pytest.raises(UsageError, match=r"`train.load_best_model_at_end` no longer .* write `train.best: loss` for"):
        read_run_file(path, ["train.load_best_model_at_end=true"])
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.log.touch()
    record = run.output / "run.json"
    values = json.loads(record.read_text())
    del values["run"]["train"]["best"]
    for recorded, meant in ((True, "loss"), (False, None)):
        values["run"]["train"]["load_best_model_at_end"] = recorded
        record.write_text(json.dumps(values))
        assert folder.read_run().train.best == meant
        folder.check(make_run(train={"best": meant}), {})


def test_trackers_and_how_questions_are_answered_may_change_when_a_run_is_resumed():
    assert {"train.track", "eval.engine", "eval.tokens_per_wave", "eval.max_new_tokens"} <= HARMLESS


@pytest.mark.parametrize(
    ("value", "expected"), [("wandb", ["wandb"]), (["mlflow", "tensorboard"], ["mlflow", "tensorboard"])]
)
def test_trackers_are_one_or_a_list(value, expected):
    assert TrainSection(track=value).track == expected


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ValueError, match="'tensorboard', 'wandb' or 'mlflow'"):
        TrainSection(track=["comet"])
