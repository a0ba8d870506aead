"""A training that was stopped and went on ends as one that was not stopped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from itertools import chain

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lookonce.cache.store.reader import VisionCache
from lookonce.errors import CacheError, RunFolderError
from lookonce.eval.run import evaluate_run
from lookonce.run.inputs import Inputs
from lookonce.train.data.batches import Feed
from lookonce.train.data.sampler import Order
from lookonce.train.loop.metrics_log import StepLines
from lookonce.workflow.train import train

MODES = ["shared", "separate"]
QUIET = {"notify": lambda note: None}


class InterruptedLines(StepLines):
    """Stands for a cluster that ends the job after a step."""

    stops_at: int

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == self.stops_at:
            raise KeyboardInterrupt


def train_until(run, step, monkeypatch, **how):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.train.train.StepLines", type("Lines", (InterruptedLines,), {"stops_at": step}))
        train(run, **QUIET, **how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("interrupted", "goes_on_from"),
    [(6, 4), (13, 11), (18, 16)],
    ids=["in the first epoch", "at its edge", "in a later one"],
)
def test_resumed_equals_uninterrupted(trainings, monkeypatch, mode, interrupted, goes_on_from):
    notes = []
    run = trainings.parts(mode, save_steps=goes_on_from)
    train_until(run, interrupted, monkeypatch)
    assert not (run.output / "summary.json").exists()
    with pytest.raises(RunFolderError, match=f"unfinished, with checkpoint-{goes_on_from}; add --resume"):
        train(run, notify=notes.append)
    summary = train(run, resume=True, notify=notes.append)
    assert f"going on from checkpoint-{goes_on_from}" in notes and summary.first_step == goes_on_from
    trainings.assert_same_adapter(run, trainings.whole(mode))
    assert trainings.log(run) == trainings.log(trainings.whole(mode))


def test_interrupted_again_and_again_it_is_still_the_same(trainings, monkeypatch):
    run = trainings.parts("shared")
    for step in (5, 10, 15, 20):
        train_until(run, step, monkeypatch, resume=True)
    assert train(run, resume=True, **QUIET).first_step == 16
    trainings.assert_same_adapter(run, trainings.whole("shared"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")  # the compiler's are none of ours
def test_recorded_passes_go_on_as_they_would_have(trainings, monkeypatch):
    """On a GPU in bfloat16, with dropout, which recorded passes draw anew each time."""
    whole, notes = trainings.whole("shared", precision="bf16"), []
    run = trainings.make_run(**trainings.options("shared", precision="bf16"))
    train_until(run, 13, monkeypatch)
    assert train(run, resume=True, notify=notes.append).first_step == 12
    assert any("recorded" in note for note in notes)
    trainings.assert_same_adapter(run, whole)
    assert trainings.log(run) == trainings.log(whole)


KILLED = """
import os, signal, sys
import lookonce.train.train as run
from lookonce.cli import main

class KilledLines(run.StepLines):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

run.StepLines = KilledLines
main(["train", sys.argv[1]])
"""


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_was_killed_loses_the_steps_since_its_checkpoint_and_no_more(trainings, tmp_path, mode):
    run = trainings.parts(mode)
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run.yaml")], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert train(run, resume=True, **QUIET).first_step == 4
    trainings.assert_same_adapter(run, trainings.whole(mode))


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(trainings, monkeypatch):
    run = trainings.parts("shared")
    train_until(run, 9, monkeypatch)
    (run.output / "checkpoints" / "checkpoint-8" / "trainer_state.json").write_text('{"best_global')
    assert train(run, resume=True, **QUIET).first_step == 4
    trainings.assert_same_adapter(run, trainings.whole("shared"))


@pytest.mark.parametrize("mode", MODES)
def test_resuming_reads_nothing_and_makes_no_batches_of_the_steps_that_were_done(
    make_run, trainings, monkeypatch, mode
):
    trainings.whole(mode)
    options = trainings.options(mode, steps=9, save_steps=8, eval_steps=None)
    options["data"]["val"] = []
    run = make_run(**options)
    train_until(run, 9, monkeypatch)

    read, made, orders = [], [], []
    get_many, batch = VisionCache.get_many, Feed.batch

    def counted_get_many(self, keys, **how):
        read.extend(keys)
        return get_many(self, keys, **how)

    def counted_batch(self, forward):
        made.append(forward)
        orders.append(self.order)
        return batch(self, forward)

    monkeypatch.setattr(VisionCache, "get_many", counted_get_many)
    monkeypatch.setattr(Feed, "batch", counted_batch)
    assert train(run, resume=True, **QUIET).first_step == 8
    steps = list(orders[0].epoch(0))
    left = list(chain.from_iterable(steps[8:]))
    assert len(steps[8]) <= len(made) <= len(steps[8]) + run.train.prefetch + 1 < sum(map(len, steps[:8]))
    assert made == left[: len(made)]
    shown = [
        key
        for forward in made
        for group in forward.pack.groups
        for key in orders[0].examples[group.examples[0]].image_keys
    ]
    assert set(read) == set(shown)


def test_a_training_whose_adapter_could_not_be_saved_makes_no_step_more(trainings, monkeypatch):
    """Trainer would make one: it looks at the number of steps only after a step."""
    run = trainings.parts("shared")
    save = PeftModel.save_pretrained

    def interrupted(self, folder, **how):
        if str(folder) == str(run.output / "adapter"):
            raise KeyboardInterrupt
        save(self, folder, **how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PeftModel, "save_pretrained", interrupted)
        train(run, **QUIET)
    assert train(run, resume=True, **QUIET).num_steps == trainings.num_steps
    trainings.assert_same_adapter(run, trainings.whole("shared"))
    assert trainings.log(run) == trainings.log(trainings.whole("shared"))


def test_a_finished_run_is_not_trained_again(make_run):
    notes: list[str] = []
    run = make_run(train={"steps": 2})
    Inputs.open(run).build()
    first = train(run, notify=notes.append)
    before = (run.output / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns
    assert train(run, resume=True, notify=notes.append) == first
    assert "is trained already" in notes[-1]
    assert (run.output / "adapter" / "adapter_model.safetensors").stat().st_mtime_ns == before


def test_restart_trains_anew_and_keeps_the_old_run(make_run, trainings):
    run = make_run(train={"steps": 2})
    Inputs.open(run).build()
    train(run, **QUIET)
    before = trainings.adapter(run)
    train(run, restart=True, **QUIET)
    assert json.loads((run.output.with_name("run.old-1") / "summary.json").read_text())["num_steps"] == 2
    assert all((before[name] == weight).all() for name, weight in trainings.adapter(run).items())


def test_checkpoints_and_log_are_what_the_run_file_asks_for(make_run):
    run = make_run(train={"steps": 6, "save_steps": 1, "save_total_limit": 2, "logging_steps": 2})
    Inputs.open(run).build()
    train(run, **QUIET)
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
    train(run, **QUIET)
    predictions = run.output / "predictions" / "val.jsonl"
    before = predictions.read_text()
    evaluate_run(run.output)
    assert predictions.read_text() == before


def test_rounded_features_in_a_float32_training_are_told(make_run):
    notes: list[str] = []
    run = make_run(train={"steps": 1}, cache={"dtype": "bfloat16"})
    Inputs.open(run).build()
    train(run, notify=notes.append)
    assert any("stored in bfloat16" in note for note in notes)


def test_an_adapter_is_not_evaluated_on_another_model(make_run, sample, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    run = make_run(model={"path": str(tmp_path / "model")}, train={"steps": 1})
    Inputs.open(run).build()
    train(run, **QUIET)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name] * 0}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for again in (lambda: evaluate_run(run.output), lambda: train(run, resume=True, notify=print)):
        with pytest.raises(RunFolderError, match="model"):
            again()


@pytest.mark.parametrize("goes_on_from", [0, 4])
def test_reading_goes_on_from_one_epoch_into_the_next(trainings, monkeypatch, goes_on_from):
    run = trainings.parts("shared")
    if goes_on_from:
        train_until(run, goes_on_from + 1, monkeypatch)
    begun, steps = [], Order.steps
    monkeypatch.setattr(Order, "steps", lambda self, start, end: begun.append(start) or steps(self, start, end))
    assert train(run, resume=True, **QUIET).num_steps > 2 * trainings.steps_an_epoch
    assert begun == [goes_on_from]


def test_other_questions_may_be_asked_of_a_trained_run(make_run, sample, tmp_path):
    lines = (sample / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join(lines))
    data = {"test": str(tmp_path / "test.jsonl"), "image_root": str(sample)}
    run = make_run(data=data, train={"steps": 1})
    Inputs.open(run).build()
    train(run, **QUIET)
    (tmp_path / "test.jsonl").write_text("".join(lines[:3]))
    assert evaluate_run(run.output, "test")[0].overall.num_questions == 3
    assert train(run, resume=True, **QUIET).num_steps == 1


def test_a_refused_restart_leaves_the_old_run_where_it_is(make_run):
    run = make_run(train={"steps": 1})
    Inputs.open(run).build()
    train(run, **QUIET)
    with pytest.raises(CacheError):
        train(make_run(train={"steps": 1}, cache={"max_pixels": 9_999}), restart=True, **QUIET)
    assert (run.output / "summary.json").exists()
