"""Exact match while training: it changes no number of the training, survives interruptions, and chooses the result."""

from __future__ import annotations

import json
import os
import signal

import pytest
from safetensors.torch import load_file

from lookonce.errors import Stopped
from lookonce.status import find_state
from lookonce.train.loop.log_files import MetricsLog
from lookonce.train.train import Training
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}


def training(trainings, name, evaluation, mode="shared", **changes):
    """A training whose questions are those that it is asked meanwhile and at the end, of which it answers some right.

    `evaluation` changes the section `eval`, `changes` the section `train`.
    """
    options = trainings.options(mode, **{"scheduler": "constant", "learning_rate": 0.002} | changes)
    options["data"] |= {split: options["data"]["train"] for split in ("val", "test")}
    output = trainings.make_run().output.with_name(name)
    return trainings.make_run(**options | {"eval": options["eval"] | evaluation, "output": str(output)})


def measured(run):
    """The steps after which questions were answered, their number and the exact match."""
    lines = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
    names = ("step", "eval_num_questions", "eval_exact_match")
    return [tuple(line[name] for name in names) for line in lines if "eval_exact_match" in line]


def losses(trainings, run):
    return [line for line in trainings.log(run) if line[2:4] != [None, None]]


def interrupt_after(step, monkeypatch):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(MetricsLog, "on_step_end", on_step_end)


@pytest.mark.guarantee(
    "A training that answers questions meanwhile has the losses, gradients and adapter of one that does not, "
    "bit for bit."
)
@pytest.mark.parametrize(("mode", "engine"), [("shared", "shared"), ("shared", "generate"), ("separate", "shared")])
def test_a_training_that_answers_questions_has_the_numbers_of_one_that_does_not(trainings, mode, engine):
    is_first = (mode, engine) == ("shared", "shared")
    meanwhile = {"every": 5, "engine": engine, "max_questions": None if is_first else 10}
    steps = 12 if is_first else 6
    plain = training(trainings, "plain", {"max_new_tokens": 1}, mode, steps=steps)
    run = training(trainings, "answering", meanwhile, mode, steps=steps)
    train(plain, **QUIET)
    summary = train(run, **QUIET)
    trainings.assert_same_adapter(run, plain)
    assert losses(trainings, run) == trainings.log(plain)
    assert [step for step, _, _ in measured(run)] == ([5, 10, 12] if is_first else [5, 6])
    if is_first:
        assert {number for _, number, _ in measured(run)} == {summary.num_questions}
        assert 0 < summary.exact_match < 1 and measured(run)[-1][2] == summary.exact_match


@pytest.mark.guarantee(
    "A training that answers questions meanwhile has the same exact match when it is interrupted and resumed."
)
def test_an_interrupted_training_has_the_exact_match_of_an_uninterrupted_one(trainings, monkeypatch):
    """The checkpoint before the interruption is that of the epoch's last step, after which questions are answered."""
    longer, run = (
        training(trainings, name, {"every": "epoch", "max_questions": 40}, save_steps=11, steps=16)
        for name in ("uninterrupted", "interrupted")
    )
    train(longer, **QUIET)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(14, patch)
        train(run, **QUIET)
    assert train(run, resume=True, **QUIET).first_step == 11
    assert measured(run) == measured(longer) and [line[0] for line in measured(run)] == [11, 16]
    assert all(0 < number <= 40 for _, number, _ in measured(run))
    trainings.assert_same_adapter(run, longer)


@pytest.mark.guarantee("`train.best: metric` keeps the checkpoint with the most right answers.")
def test_the_checkpoint_with_the_most_right_answers_is_the_result(trainings, monkeypatch):
    run = training(trainings, "best", {"every": 3}, save_steps=3, best="metric")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(20, patch)
        train(run, **QUIET)
    summary = train(run, resume=True, **QUIET)
    found = {step: value for step, _, value in measured(run)}
    best = max(found, key=found.get)
    assert 3 < best < 24 and trainings.checkpoints(run) == [best, 24]
    kept = load_file(run.output / "checkpoints" / f"checkpoint-{best}" / "adapter_model.safetensors")
    assert all((kept[name] == weight).all() for name, weight in trainings.adapter(run).items())
    assert summary.exact_match == found[best] > found[24]


def test_a_signal_at_the_end_of_an_epoch_stops_a_training_when_its_questions_are_answered(trainings, monkeypatch):
    run = training(trainings, "stopped", {"every": "epoch"}, save_steps=None, best="metric")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 11:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(MetricsLog, "on_step_end", on_step_end)
    with pytest.raises(Stopped, match="after step 11 of 24, which is saved"):
        train(run, **QUIET)
    assert [line[0] for line in measured(run)] == trainings.checkpoints(run) == [11]


STOPPING = {
    "score": ({"every": 3, "metric": "token_f1"}, {"save_steps": 3, "eval_steps": None, "best": "metric"}, 2),
    "score of epochs": (
        {"every": "epoch"},
        {"save_steps": None, "eval_steps": None, "best": "metric", "learning_rate": 1e-5},
        1,
    ),
    "loss": ({}, {"save_steps": 3, "best": "loss", "learning_rate": 0.03}, 2),
    "loss of epochs": (
        {},
        {"save_steps": None, "eval_steps": None, "best": "loss", "learning_rate": 1e-12},
        1,
    ),
}


def end_by(values, patience, is_better):
    """The step after which a training without a better value ends, and the step of the best one before."""
    best = worse = 0
    for step, value in values.items():
        best, worse = (step, 0) if not best or is_better(value, values[best]) else (best, worse + 1)
        if worse == patience:
            return step, best
    raise AssertionError(f"{values} has no such end")


@pytest.mark.guarantee(
    "`train.patience` ends a training after that many measurements without a better one, also when it is killed and "
    "resumed: with the same step, log and adapter, bit for bit."
)
@pytest.mark.parametrize("name", STOPPING)
def test_a_training_that_gets_no_better_ends_and_resumes_to_the_same_end(trainings, monkeypatch, name):
    evaluation, changes, patience = STOPPING[name]
    key, is_better = ("eval_loss", float.__lt__) if changes["best"] == "loss" else ("eval_score", float.__gt__)
    key = "eval_exact_match" if key == "eval_score" and "metric" not in evaluation else key
    whole = training(trainings, "whole", evaluation, **changes)
    train(whole, **QUIET)
    lines = [json.loads(line) for line in (whole.output / "log.jsonl").read_text().splitlines()]
    last, best = end_by({line["step"]: line[key] for line in lines if key in line}, patience, is_better)
    assert last < lines[-1]["step"]

    run = training(trainings, "patient", evaluation, patience=patience, **changes)
    notes = []
    summary = train(run, notify=notes.append)
    assert summary.num_steps == last and trainings.checkpoints(run)[-1] == last
    kept = load_file(run.output / "checkpoints" / f"checkpoint-{best}" / "adapter_model.safetensors")
    assert all((kept[weight] == value).all() for weight, value in trainings.adapter(run).items())
    worse = "1 measurement was" if patience == 1 else f"{patience} measurements in a row were"
    said = f"(train.patience): {worse} no better than that after step {best}"
    state = find_state(run).training.text()
    assert all(said in " ".join(text.split()) for text in ("\n".join(notes), summary.text(), state))
    expected = [line for line in trainings.log(whole) if line[0] < last]
    assert [line for line in trainings.log(run) if line[0] < last] == expected

    killed = training(trainings, "killed", evaluation, patience=patience, **changes)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(last - 1, patch)
        train(killed, **QUIET)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # after the last checkpoint
        patch.setattr(Training, "_save_adapter", lambda self, model: os.kill(os.getpid(), signal.SIGINT))
        train(killed, resume=True, **QUIET)
    assert trainings.checkpoints(killed)[-1] == last
    resumed = train(killed, resume=True, **QUIET)
    assert (resumed.first_step, resumed.num_steps, resumed.ended_early) == (last, last, summary.ended_early)
    assert trainings.log(killed) == trainings.log(run)
    trainings.assert_same_adapter(killed, run)
