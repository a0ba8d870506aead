"""A training that starts with the adapter of another run: its weights, nothing else, and nothing is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lookonce.errors import RunFolderError, UsageError
from lookonce.files import hash_file
from lookonce.run.folder import RunFolder
from lookonce.train.loop.log_files import MetricsLog
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}


@pytest.fixture
def options(trainings):
    """All records are one step, so that every step has the same batch; the learning rate is constant."""
    options = trainings.options("shared", steps=3, scheduler="constant", warmup=0, learning_rate=0.01)
    options["data"]["val"] = []
    return options | {"batch": {"samples_per_step": 87, "order": "as_given"}, "lora": {}, "eval": {"split": "val"}}


def content(folder: Path) -> dict[str, str]:
    return {str(path): hash_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def losses(trainings, run) -> list[tuple]:
    return [(line[2], line[4]) for line in trainings.log(run)]


def interrupted_at(step, monkeypatch):
    class Interrupted(MetricsLog):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            if state.global_step == step:
                raise KeyboardInterrupt

    monkeypatch.setattr("lookonce.train.train.MetricsLog", Interrupted)


@pytest.mark.guarantee(
    "A training that starts from another run begins with exactly the weights of that run, and changes nothing of it."
)
def test_the_first_step_has_the_weights_of_the_other_run_which_stays_as_it_is(trainings, options, make_run, tmp_path):
    notes = []
    longer = make_run(**options | {"train": options["train"] | {"steps": 4}}, output=str(tmp_path / "longer"))
    first = make_run(**options, output=str(tmp_path / "first"))
    start = {"start_from": str(first.output), "seed": 5, "learning_rate": 0.001}
    second = make_run(**options | {"train": options["train"] | start}, output=str(tmp_path / "second"))
    train(longer, **QUIET)
    train(first, **QUIET)
    before = content(first.output)
    train(second, notify=notes.append)
    assert content(first.output) == before
    assert losses(trainings, second)[0] == losses(trainings, longer)[3] != losses(trainings, longer)[0]
    assert any(note.startswith(f"training starts with the adapter of {first.output}, and a new") for note in notes)
    recorded = RunFolder(second.output).recorded_inputs()
    assert recorded["start"] == hash_file(first.output / "adapter" / "adapter_model.safetensors")
    assert "start" not in RunFolder(first.output).recorded_inputs()


@pytest.mark.guarantee("A training that starts from another run resumes exactly, also when that run is gone.")
def test_an_interrupted_one_ends_with_the_same_adapter_also_if_the_other_run_is_gone(trainings, monkeypatch, tmp_path):
    other = trainings.uninterrupted("shared")
    start = {"start_from": str(tmp_path / "first"), "steps": 8, "save_steps": 3}
    shutil.copytree(other.output, tmp_path / "first")
    whole = trainings.uninterrupted("shared", **start)
    run = trainings.unstarted("shared", **start)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupted_at(5, patch)
        train(run, **QUIET)
    shutil.rmtree(tmp_path / "first")
    assert train(run, resume=True, **QUIET).first_step == 3
    trainings.assert_same_adapter(run, whole)
    assert trainings.log(run) == trainings.log(whole)
    assert train(run, **QUIET)  # finished: nothing is needed


@pytest.mark.guarantee("A resumed training with another start is refused.")
def test_another_start_is_refused(trainings, monkeypatch, tmp_path):
    other = trainings.uninterrupted("shared")
    run = trainings.unstarted("shared", start_from=str(other.output), steps=4)
    train(run, **QUIET)
    copy = tmp_path / "copy"
    shutil.copytree(other.output, copy)
    moved = run.model_copy(update={"train": run.train.model_copy(update={"start_from": copy})})
    assert train(moved, **QUIET)  # the same adapter elsewhere
    weights = copy / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    new = run.model_copy(update={"train": run.train.model_copy(update={"start_from": None})})
    for wrong in (moved, new):
        with pytest.raises(RunFolderError, match=r"holds another run, which differs in\n  inputs.start: this run"):
            train(wrong, resume=True, **QUIET)


def test_what_cannot_be_started_from_is_named(trainings, make_run, tmp_path):
    other = trainings.uninterrupted("shared")
    run = trainings.unstarted("shared", start_from=str(tmp_path / "none"))
    with pytest.raises(RunFolderError, match=r"start_from: .*none is not a run folder; name the output folder"):
        train(run, **QUIET)
    untrained = RunFolder(tmp_path / "untrained")
    untrained.claim(run, {})
    run = trainings.unstarted("shared", start_from=str(untrained.folder))
    message = rf"untrained is not trained yet; train it first: lookonce train {untrained.folder}/run.yaml --resume"
    with pytest.raises(RunFolderError, match=message):
        train(run, **QUIET)
    options = trainings.options("shared", start_from=str(other.output))
    shaped = make_run(**options | {"lora": {"rank": 8, "targets": ["v_proj", "q_proj"]}})
    with pytest.raises(
        UsageError, match=r"(?s)shape, .*\n  lora.rank: this run 8, that one 4\n  lora.targets: this run"
    ):
        train(shaped, **QUIET)
    assert not shaped.output.exists()
