"""A training that is extended ends like a longer one; and what does not change a training may change in between."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from lookonce.train.loop.log_files import MetricsLog
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}
WARMUP = {"scheduler": "constant_with_warmup", "warmup": 5}


def with_train(run, **changes):
    return run.model_copy(update={"train": run.train.model_copy(update=changes)})


@pytest.mark.guarantee("A training that is extended ends with the adapter of a longer one, bit for bit.")
@pytest.mark.parametrize(
    ("schedule", "first"),
    [({"scheduler": "constant"}, 11), (WARMUP, 3), (WARMUP, 14)],
    ids=["epoch", "warmup", "within"],
)
def test_an_extended_training_ends_like_a_longer_one(trainings, schedule, first):
    """First to the end of an epoch, within the warm-up, or within the second epoch; with dropout."""
    longer, notes = trainings.uninterrupted("shared", **schedule), []
    run = trainings.make_run(**trainings.options("shared", **schedule))
    assert train(with_train(run, steps=first), **QUIET).num_steps == first
    results = {path.name for path in run.output.iterdir()}
    before = load_file(run.output / "adapter" / "adapter_model.safetensors")
    summary = train(run, resume=True, notify=notes.append)
    assert (summary.num_steps, summary.first_step) == (trainings.num_steps, first)
    trainings.assert_same_adapter(run, longer)
    kept = run.output / f"steps-{first}"
    assert f"moved the results of the shorter training to {kept}" in notes
    assert {path.name for path in run.output.iterdir()} == results | {kept.name}
    assert {path.name for path in kept.iterdir()} == {"adapter", "trained.json", "report.html", "summary.json"}
    assert all(
        (before[name] == weight).all()
        for name, weight in load_file(kept / "adapter" / "adapter_model.safetensors").items()
    )
    assert json.loads((run.output / "run.json").read_text())["run"]["train"]["steps"] == trainings.num_steps


def test_more_epochs_continue_a_finished_training(make_run, trainings):
    options = trainings.options("separate", scheduler="constant", steps=None, save_steps=None, eval_steps=None)
    longer = make_run(
        **options | {"train": options["train"] | {"epochs": 2}, "output": str(make_run().output) + "-longer"}
    )
    train(longer, **QUIET)
    run = with_train(longer, epochs=1).model_copy(update={"output": make_run().output})
    assert train(run, **QUIET).num_steps == trainings.steps_an_epoch
    run = with_train(run, epochs=2)
    assert train(run, resume=True, **QUIET).num_steps == 2 * trainings.steps_an_epoch
    trainings.assert_same_adapter(run, longer)
    assert trainings.log(run) == trainings.log(longer)


@pytest.mark.guarantee("A training that is saved and validated at other steps ends with the same adapter, bit for bit.")
def test_an_adapter_does_not_depend_on_when_it_is_saved_and_validated(trainings, monkeypatch):
    """The steps of both change at the resumption too, and are those of the run file from then on."""
    run = trainings.unstarted("shared", save_steps=7, eval_steps=10)

    def interrupted(self, args, state, control, **kwargs):
        if state.global_step == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MetricsLog, "on_step_end", interrupted)
        train(run, **QUIET)
    run = with_train(run, save_steps=5, eval_steps=8)
    assert train(run, resume=True, **QUIET).first_step == 7
    trainings.assert_same_adapter(run, trainings.uninterrupted("shared"))
    assert trainings.checkpoints(run) == [20, 24]
    assert [line[0] for line in trainings.log(run) if line[3] is not None] == [8, 16, 24]
