"""Which trainings can be extended: those whose learning rates do not depend on the number of steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.answers import look_trained, write_checkpoint

from lookonce.errors import RunFolderError
from lookonce.files import read_json
from lookonce.run.config import RunFile
from lookonce.run.folder import STATE, RunFolder
from lookonce.train.loop.checkpoints import RESULTS, CurrentIntervals, Start, check_extension, keep_results

STEPS_AN_EPOCH = 11


@pytest.fixture
def trained(make_run):
    """Makes the folder of a run that was trained for some steps, and whose last checkpoint is after `step`."""

    def trained(step: int | None = None, num_steps: int = 24, **train) -> tuple[RunFolder, RunFile]:
        run = make_run(train={"steps": num_steps} | train)
        folder = RunFolder(run.output)
        folder.claim(run, {})
        look_trained(folder, num_steps=num_steps)
        for name in {*RESULTS} - {"trained.json", "adapter"}:
            (folder.folder / name).touch()
        step = step or num_steps
        write_checkpoint(folder, {"global_step": step, "epoch": step / STEPS_AN_EPOCH, "max_steps": num_steps})
        return folder, run

    return trained


def longer(run: RunFile, **train) -> RunFile:
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": 48} | train)})


def start_of(folder: RunFolder, run, restart: bool) -> Start:
    return Start.of(SimpleNamespace(folder=folder, run=run, notify=pytest.fail), {}, True, restart)


@pytest.mark.parametrize(
    ("train", "step"),
    [
        ({"scheduler": "constant"}, 24),
        ({"scheduler": "constant_with_warmup", "warmup": 7}, 24),
        ({"scheduler": "constant_with_warmup", "warmup": 0}, 24),
        ({"scheduler": "inverse_sqrt", "warmup": 7}, 24),
        ({"scheduler": "linear", "warmup": 7}, 7),
    ],
    ids=str,
)
def test_a_training_can_be_extended_where_its_learning_rates_stay(trained, train, step):
    """Also an unfinished one that is still in its warm-up, with any schedule."""
    folder, run = trained(step, **train)
    check_extension(folder, longer(run))
    check_extension(folder, longer(run, steps=None, epochs=2.5))


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            {"scheduler": "cosine", "warmup": 7},
            r"train.scheduler: cosine and train.warmup: 7 the .* \(step 9: 0.000198",
        ),
        ({"scheduler": "linear", "warmup": 0}, r"train.scheduler: linear .* \(step 2: 0.0001917 or 0.0001958\)"),
        (
            {"scheduler": "constant_with_warmup", "warmup": 0.25},
            r"train.warmup: 0.25 .* \(step 2: 3.333e-05 or 1.667e-05",
        ),
        ({"scheduler": "reduce_lr_on_plateau"}, r"train.scheduler: reduce_lr_on_plateau"),
    ],
    ids=str,
)
def test_a_training_whose_learning_rates_would_differ_is_refused_with_the_first_of_them(trained, train, said):
    folder, run = trained(**train)
    message = rf"training of 24 steps, which cannot be continued to 48: .*{said}.*another `output` or with --restart"
    with pytest.raises(RunFolderError, match=message):
        check_extension(folder, longer(run))


@pytest.mark.parametrize(
    ("train", "wanted", "said"),
    [
        ({"scheduler": "constant"}, {"steps": 23}, "continued to 23: its last checkpoint is after step 24; train from"),
        (
            {"scheduler": "constant"},
            {"steps": None, "epochs": 2},
            "continued to 22: its last checkpoint is after step 24",
        ),
        ({"scheduler": "constant", "best": "loss"}, {}, "with train.best: loss it chose"),
    ],
    ids=str,
)
def test_a_training_is_neither_shortened_nor_chosen_from_twice(trained, train, wanted, said):
    folder, run = trained(**train)
    with pytest.raises(RunFolderError, match=said):
        check_extension(folder, longer(run, **wanted))


def test_a_training_without_a_checkpoint_cannot_be_extended(trained):
    folder, run = trained(scheduler="constant")
    (folder.last_checkpoint / STATE).unlink()
    with pytest.raises(RunFolderError, match=r"checkpoints holds no complete checkpoint, .*; train from the start"):
        check_extension(folder, longer(run))


@pytest.mark.parametrize("num_moved", range(len(RESULTS) + 1))
def test_results_are_kept_whenever_moving_them_is_interrupted(trained, monkeypatch, num_moved):
    folder, run = trained(scheduler="constant")
    rename, moved = Path.rename, []

    def interrupted(path: Path, target: Path) -> Path:
        if len(moved) == num_moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted)
        if num_moved < len(RESULTS):
            with pytest.raises(KeyboardInterrupt):
                keep_results(folder)
    assert not (folder.is_finished and not folder.trained.exists())
    assert not folder.trained.exists() or (folder.adapter.exists() and folder.has_other_length(longer(run)))
    keep_results(folder)
    assert {path.name for path in (folder.folder / "steps-24").iterdir()} == set(RESULTS)
    assert not any((folder.folder / name).exists() for name in RESULTS)
    assert keep_results(folder) is None


def test_a_trained_run_starts_from_its_last_checkpoint_if_it_is_extended(trained):
    folder, run = trained(scheduler="constant")
    assert start_of(folder, run, restart=False) == Start(is_finished=True)
    folder.summary.unlink()
    assert start_of(folder, run, restart=False) == Start(is_trained=True, checkpoint=folder.last_checkpoint)
    assert start_of(folder, longer(run), restart=False) == Start(checkpoint=folder.last_checkpoint)
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


def test_a_missing_best_checkpoint_is_an_error_if_it_would_be_the_result(trained):
    folder, run = trained(best="loss")
    record_best(folder, "/another/run/checkpoints/checkpoint-8")
    folder.trained.unlink()
    folder.summary.unlink()
    with pytest.raises(
        RunFolderError, match=r"records /another/.* and .* holds no complete checkpoint-8; copy it there"
    ):
        start_of(folder, run, restart=False)
    assert start_of(folder, run, restart=True) == Start()


def test_a_missing_best_checkpoint_is_no_error_where_the_last_one_is_the_result(trained):
    folder, run = trained()
    record_best(folder, "/another/run/checkpoints/checkpoint-8")
    folder.trained.unlink()
    folder.summary.unlink()
    assert start_of(folder, run, restart=False) == Start(checkpoint=folder.last_checkpoint)
