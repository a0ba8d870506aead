"""A training that was stopped and went on ends as one that was not stopped."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from lookonce.errors import RunFolderError
from lookonce.train.inputs import Inputs
from lookonce.train.progress import StepLines
from lookonce.train.run import train


class StoppedAtStep5(StepLines):
    """Stands for a cluster that ends the job."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def adapter_of(run):
    return load_file(run.output / "adapter" / "adapter_model.safetensors")


def test_resumed_equals_uninterrupted(make_run, monkeypatch, tmp_path):
    notes: list[str] = []
    options = {"train": {"steps": 6, "save_steps": 2, "eval_steps": 3}, "lora": {"dropout": 0.1}}
    whole, parts = make_run(output=str(tmp_path / "whole"), **options), make_run(**options)
    Inputs.open(whole).build()
    train(whole, say=notes.append)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.train.run.StepLines", StoppedAtStep5)
        train(parts, say=notes.append)
    assert not (parts.output / "summary.json").exists()
    with pytest.raises(RunFolderError, match="unfinished, with checkpoint-4; add --resume"):
        train(parts, say=notes.append)
    train(parts, resume=True, say=notes.append)

    assert "going on from checkpoint-4" in notes
    expected, found = adapter_of(whole), adapter_of(parts)
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)


def test_a_finished_run_is_not_trained_again(make_run):
    notes: list[str] = []
    run = make_run(train={"steps": 2})
    Inputs.open(run).build()
    first = train(run, say=notes.append)
    before = (run.output / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    assert train(run, resume=True, say=notes.append) == first
    assert "is trained already" in notes[-1]
    assert (run.output / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns == before


def test_restart_trains_anew_and_keeps_the_old_run(make_run):
    run = make_run(train={"steps": 2})
    Inputs.open(run).build()
    train(run, say=lambda note: None)
    before = adapter_of(run)
    train(run, restart=True, say=lambda note: None)
    assert json.loads((run.output.with_name("run.old-1") / "summary.json").read_text())["num_steps"] == 2
    assert all((before[name] == weight).all() for name, weight in adapter_of(run).items())


def test_checkpoints_and_log_are_what_the_run_file_asks_for(make_run):
    run = make_run(train={"steps": 6, "save_steps": 1, "save_total_limit": 2, "logging_steps": 2})
    Inputs.open(run).build()
    train(run, say=lambda note: None)
    assert sorted(path.name for path in (run.output / "checkpoints").iterdir()) == ["checkpoint-5", "checkpoint-6"]
    lines = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 4, 6]
    assert all(
        {"grad_norm", "samples_per_second", "eta_seconds", "wait_share"} <= set(line)
        for line in lines
        if "loss" in line
    )
