"""Evaluation of a trained run: the same answers as in training, and only on the model that was trained on."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from lookonce.errors import RunFolderError
from lookonce.eval.answers.files import AnsweringCost
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import read_predictions
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}


def test_in_bfloat16_with_trained_embeddings_train_and_eval_give_the_same_answers(make_cached_run):
    run = make_cached_run(train={"steps": 8, "precision": "bf16"}, lora={"modules_to_save": ["embed_tokens"]})
    train(run, **QUIET)
    predictions = run.output / "predictions" / "val.jsonl"
    before = predictions.read_text()
    rows = read_predictions(predictions)
    assert all(len(row.image_keys) == len(row.images) == 1 and row.source for row in rows)
    assert AnsweringCost.read(run.output / "answering" / "val.json").num_answered == len(rows)
    evaluate_run(run.output)
    assert predictions.read_text() == before


def test_an_adapter_is_not_evaluated_on_another_model(make_cached_run, sample, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    run = make_cached_run(model={"path": str(tmp_path / "model")}, train={"steps": 1})
    train(run, **QUIET)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name] * 0}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for again in (lambda: evaluate_run(run.output), lambda: train(run, resume=True, notify=print)):
        with pytest.raises(RunFolderError, match="model"):
            again()


def test_other_questions_may_be_asked_of_a_trained_run(make_cached_run, sample, tmp_path):
    lines = (sample / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join(lines))
    data = {"test": str(tmp_path / "test.jsonl"), "image_root": str(sample)}
    run = make_cached_run(data=data, train={"steps": 1})
    train(run, **QUIET)
    (tmp_path / "test.jsonl").write_text("".join(lines[:3]))
    assert evaluate_run(run.output, "test")[0].overall.num_questions == 3
    assert train(run, resume=True, **QUIET).num_steps == 1
