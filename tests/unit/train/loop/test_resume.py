"""Where a training starts, and the best checkpoint that it continues with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.answers import look_trained, write_checkpoint

from lookonce.errors import RunFolderError
from lookonce.files import read_json
from lookonce.run.config import RunFile
from lookonce.run.folder import STATE, RunFolder
from lookonce.train.loop.checkpoints import CurrentIntervals, Start

STEPS_AN_EPOCH = 11


@pytest.fixture
def trained(make_run):
    """Makes the folder of a run that was trained for some steps, and whose last checkpoint is after `step`."""

    def trained(step: int | None = None, num_steps: int = 24, **train) -> tuple[RunFolder, RunFile]:
        run = make_run(train={"steps": num_steps} | train)
        folder = RunFolder(run.output)
        folder.claim(run, {})
        look_trained(folder, num_steps=num_steps)
        folder.summary.touch()
        step = step or num_steps
        write_checkpoint(folder, {"global_step": step, "epoch": step / STEPS_AN_EPOCH, "max_steps": num_steps})
        return folder, run

    return trained


def longer(run: RunFile, **train) -> RunFile:
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": 48} | train)})


def start_of(folder: RunFolder, run, restart: bool) -> Start:
    return Start.of(SimpleNamespace(folder=folder, run=run, notify=pytest.fail), {}, True, restart)


def test_a_trained_run_is_only_evaluated_and_one_of_another_length_is_another_run(trained):
    folder, run = trained(scheduler="constant")
    assert start_of(folder, run, restart=False) == Start(is_finished=True)
    folder.summary.unlink()
    assert start_of(folder, run, restart=False) == Start(is_trained=True, checkpoint=folder.last_checkpoint)
    with pytest.raises(RunFolderError, match="train.steps: this run 48, that one 24"):
        start_of(folder, longer(run), restart=False)
    assert start_of(folder, longer(run), restart=True) == Start()


def test_an_adapter_that_was_trained_on_other_frozen_weights_is_said_to_be(trained):
    folder, run = trained(frozen="nf4")
    asked = {"epochs": 0, "steps": None}
    for frozen, said in (("nf4", ""), ("precision", " (trained with train.frozen: nf4)")):
        other = run.model_copy(update={"train": run.train.model_copy(update=asked | {"frozen": frozen})})
        assert f"the adapter of {folder.folder}{said} answers as it is" in "".join(Start(other=folder).notes(other))


def record_best(folder: RunFolder, best: str) -> None:
    state = read_json(folder.last_checkpoint / STATE)
    write_checkpoint(folder, state | {"best_model_checkpoint": best})


def test_the_best_checkpoint_that_training_ends_with_is_that_of_its_own_folder(trained):
    folder, _ = trained()
    record_best(folder, "/another/run/checkpoints/checkpoint-24")
    computed = []
    state = SimpleNamespace(global_step=24, max_steps=24, compute_steps=lambda *given: computed.append(given))
    for loads_best, expected in ((False, None), (True, str(folder.last_checkpoint))):
        state.best_model_checkpoint = None  # Trainer found none there
        arguments = SimpleNamespace(output_dir=str(folder.checkpoints), load_best_model_at_end=loads_best)
        CurrentIntervals().on_train_begin(arguments, state, None)
        assert state.best_model_checkpoint == expected
    assert len(computed) == 2


@pytest.mark.parametrize("best", ["loss", None])
def test_a_missing_best_checkpoint_is_an_error_if_it_would_be_the_result(trained, best):
    folder, run = trained(best=best)
    record_best(folder, "/another/run/checkpoints/checkpoint-8")
    folder.trained.unlink()
    folder.summary.unlink()
    if best:
        message = r"records /another/.* and .* holds no complete checkpoint-8; copy it there"
        with pytest.raises(RunFolderError, match=message):
            start_of(folder, run, restart=False)
    else:
        assert start_of(folder, run, restart=False) == Start(checkpoint=folder.last_checkpoint)
    assert start_of(folder, run, restart=True) == Start()
