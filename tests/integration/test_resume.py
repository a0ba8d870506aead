"""A training that was stopped and went on ends as one that was not stopped."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from lookonce.errors import CacheError, RunFolderError
from lookonce.train.inputs import Inputs
from lookonce.train.progress import StepLines
from lookonce.train.run import evaluate_run, train


class StoppedAtStep6(StepLines):
    """Stands for a cluster that ends the job."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == 6:
            raise KeyboardInterrupt


def adapter_of(run):
    return load_file(run.output / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_resumed_equals_uninterrupted(make_run, monkeypatch, tmp_path, sample, loader_workers):
    """Over the end of an epoch (11 steps), with dropout, which draws from the random state."""
    notes: list[str] = []
    options = {
        "data": {"train": str(sample / "test.jsonl"), "val": str(sample / "test.jsonl"), "test": []},
        "train": {"steps": 13, "save_steps": 4, "eval_steps": 3, "loader_workers": loader_workers},
        "lora": {"dropout": 0.1},
    }
    whole, parts = make_run(output=str(tmp_path / "whole"), **options), make_run(**options)
    Inputs.open(whole).build()
    train(whole, say=notes.append)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.train.run.StepLines", StoppedAtStep6)
        train(parts, say=notes.append)
    assert not (parts.output / "summary.json").exists()
    with pytest.raises(RunFolderError, match="unfinished, with checkpoint-4; add --resume"):
        train(parts, say=notes.append)
    summary = train(parts, resume=True, say=notes.append)

    assert "going on from checkpoint-4" in notes and summary.first_step == 4
    expected, found = adapter_of(whole), adapter_of(parts)
    assert expected.keys() == found.keys()
    assert all((expected[name] == found[name]).all() for name in expected)
    lines = [json.loads(line) for line in (parts.output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 14))


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


def test_in_bfloat16_with_trained_embeddings_train_and_eval_give_the_same_answers(make_run):
    run = make_run(train={"steps": 8, "precision": "bf16"}, lora={"modules_to_save": ["embed_tokens"]})
    Inputs.open(run).build()
    train(run, say=lambda note: None)
    predictions = run.output / "predictions" / "val.jsonl"
    before = predictions.read_text()
    evaluate_run(run.output)
    assert predictions.read_text() == before


def test_rounded_features_in_a_float32_training_are_told(make_run):
    notes: list[str] = []
    run = make_run(train={"steps": 1}, cache={"dtype": "bfloat16"})
    Inputs.open(run).build()
    train(run, say=notes.append)
    assert any("stored in bfloat16" in note for note in notes)


def test_an_adapter_is_not_evaluated_on_another_model(make_run, sample, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    run = make_run(model={"path": str(tmp_path / "model")}, train={"steps": 1})
    Inputs.open(run).build()
    train(run, say=lambda note: None)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name] * 0}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for again in (lambda: evaluate_run(run.output), lambda: train(run, resume=True, say=print)):
        with pytest.raises(RunFolderError, match="model"):
            again()


def test_other_questions_may_be_asked_of_a_trained_run(make_run, sample, tmp_path):
    lines = (sample / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join(lines))
    data = {"test": str(tmp_path / "test.jsonl"), "image_root": str(sample)}
    run = make_run(data=data, train={"steps": 1})
    Inputs.open(run).build()
    train(run, say=lambda note: None)
    (tmp_path / "test.jsonl").write_text("".join(lines[:3]))
    assert evaluate_run(run.output, "test")[0].overall.num_questions == 3
    assert train(run, resume=True, say=lambda note: None).num_steps == 1


def test_a_refused_restart_leaves_the_old_run_where_it_is(make_run):
    run = make_run(train={"steps": 1})
    Inputs.open(run).build()
    train(run, say=lambda note: None)
    with pytest.raises(CacheError):
        train(make_run(train={"steps": 1}, cache={"max_pixels": 9_999}), restart=True, say=lambda note: None)
    assert (run.output / "summary.json").exists()
