"""A disk, a checkpoint, a cache or a clock that fails in the middle of a training: named, and the training resumes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.errors import CacheCorrupt, DiskFull, LookonceError, RunFolderError, TrainingError
from lookonce.eval.run import evaluate_run
from lookonce.run.config import RunFile
from lookonce.run.folder import RunClaim, RunFolder
from lookonce.status import find_training
from lookonce.train.loop.checkpoints import find_checkpoint
from lookonce.train.loop.log_files import MetricsLog
from lookonce.workflow import train

FEW_STEPS_ARE_LOST = pytest.mark.guarantee(
    "A full disk, a lost or damaged shard and a clock that is set, in the middle of a training, cost at most "
    "the steps since the last checkpoint."
)

QUIET = {"notify": lambda note: None}
FEW = {"steps": 12}
"""Trainings of 12 steps, with a checkpoint after every fourth."""


@pytest.fixture
def meanwhile(monkeypatch) -> Callable[..., None]:
    """Calls a function at the end of a step of a training, or after each save."""

    def set_up(step: int, act: Callable[[], object], on_save: Callable[[Path], object] = lambda folder: None) -> None:
        class Lines(MetricsLog):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                super().on_step_end(args, state, control, **kwargs)
                if state.global_step == step:
                    act()

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                on_save(Path(args.output_dir) / f"checkpoint-{state.global_step}")

        monkeypatch.setattr("lookonce.train.train.MetricsLog", Lines)

    return set_up


def undisturbed(trainings) -> RunFile:
    return trainings.uninterrupted("shared", **FEW)


def unstarted(trainings, **changes: Any) -> RunFile:
    undisturbed(trainings)
    return trainings.make_run(**trainings.options("shared", **FEW) | changes)


def resumes(trainings, run: RunFile, step: int) -> None:
    """Check that the training resumes after a step and ends as the undisturbed one, with the same files."""
    assert train(run, resume=True, **QUIET).first_step == step
    trainings.assert_same_adapter(run, undisturbed(trainings))
    assert trainings.log(run) == trainings.log(undisturbed(trainings))
    assert names(run) == names(undisturbed(trainings))


def names(run: RunFile) -> set[str]:
    return {str(path.relative_to(run.output)) for path in run.output.rglob("*")}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# A full disk.


@FEW_STEPS_ARE_LOST
@pytest.mark.parametrize(
    ("when", "what", "step"),
    [("checkpoint", "checkpoint-8 of .*run", 4), ("log", "the files of .*run", 4), ("adapter", ".*adapter", 12)],
)
def test_a_disk_that_is_full_names_what_is_missing_and_the_training_resumes(
    trainings, meanwhile, monkeypatch, small_disk, when, what, step
):
    run, ballast = unstarted(trainings, output=str(small_disk.folder / "run")), []

    def fill_page() -> None:
        with (run.output / "log.jsonl").open("a") as file:  # up to the end of a page
            file.write(f"{'x' * (-file.tell() % 4096 - 1)}\n")
        fill(leave=0)

    def fill(leave: int) -> None:
        ballast.append(small_disk.fill(leave))

    {
        "checkpoint": lambda: meanwhile(7, lambda: fill(100_000)),
        "log": lambda: meanwhile(6, fill_page),
        "adapter": lambda: meanwhile(-1, print, lambda folder: folder.name == "checkpoint-12" and fill(20_000)),
    }[when]()
    advice = rf"checkpoint-{step} is whole: make room \(.*\), then continue with: lookonce train RUN.yaml --resume"
    with pytest.raises(DiskFull, match=rf"no room for {what}: .* \([\d,]+ bytes\) are missing. {advice}"):
        train(run, **QUIET)
    assert trainings.checkpoints(run)[-1] == step
    ballast[0].unlink()
    monkeypatch.undo()
    resumes(trainings, run, step)


# A damaged checkpoint.


@pytest.fixture
def interrupted(trainings, meanwhile, monkeypatch) -> RunFile:
    """A training that was interrupted after its ninth step."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    run = unstarted(trainings)
    meanwhile(9, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(run, **QUIET)
    monkeypatch.undo()
    return run


@pytest.mark.guarantee(
    "A damaged checkpoint is never loaded: a flipped byte in any of its files is named, and the training "
    "resumes from the checkpoint before."
)
def test_a_flipped_byte_in_any_file_of_a_checkpoint_is_named_and_the_one_before_is_taken(trainings, interrupted):
    folder, notes = RunFolder(interrupted.output), []
    last = folder.checkpoints / "checkpoint-8"
    files = {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert files < {path.name for path in last.iterdir()}
    for path in last.iterdir():
        flip(path)
        assert find_checkpoint(folder, notes.append) == folder.checkpoints / "checkpoint-4"
        assert path.name in notes[-1] and "checkpoint-8 is damaged" in notes[-1]
        flip(path)
    assert find_checkpoint(folder, notes.append) == last
    flip(last / "adapter_model.safetensors")
    resumes(trainings, interrupted, 4)


def test_a_damaged_checkpoint_does_not_become_the_result(trainings, meanwhile):
    run = unstarted(trainings, train={"steps": 4, "save_steps": 4, "eval_steps": 4, "best": "loss"})
    meanwhile(-1, print, lambda checkpoint: flip(checkpoint / "adapter_model.safetensors"))
    with pytest.raises(TrainingError, match=r"best checkpoint, .*-4, is damaged \(.*: adapter_model.safetensors\)"):
        train(run, **QUIET)
    assert not run.output.joinpath("adapter").exists()


# A damaged cache.


def flip_all(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


@FEW_STEPS_ARE_LOST
@pytest.mark.parametrize(
    ("damage", "how"),
    [(Path.unlink, "cannot be read"), (flip_all, "do not match the checksum")],
    ids=["lost", "flipped"],
)
def test_a_shard_that_fails_in_the_middle_of_an_epoch_stops_the_training(
    trainings, meanwhile, monkeypatch, tmp_path, damage, how
):
    """Each shard is opened again for each image, as in a cache of very many shards."""
    caches = tmp_path / "copied"
    run = unstarted(trainings, cache={"dir": str(caches), "shard_mb": 1})
    shutil.copytree(trainings.caches, caches, ignore=shutil.ignore_patterns("user-*"))  # other tests use it now
    monkeypatch.setattr("lookonce.cache.store.reader.NUM_OPEN", 0)

    def damage_all() -> None:
        for path in caches.glob("*/shards/*.safetensors"):
            damage(path)

    meanwhile(6, damage_all)
    named = (
        rf"features of image \w{{64}} \(.*jpg\) in .*shard-\d+.safetensors {how}.*; run: lookonce cache repair RUN.yaml"
    )
    with pytest.raises(CacheCorrupt, match=named):
        train(run, **QUIET)
    monkeypatch.undo()
    logged = trainings.log(run)
    assert 6 <= logged[-1][0] <= 6 + 2 and logged == trainings.log(undisturbed(trainings))[: len(logged)]
    with pytest.raises(LookonceError, match="lookonce cache"):
        train(run, resume=True, **QUIET)
    assert find_checkpoint(RunFolder(run.output), pytest.fail).name == "checkpoint-4"
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert CliRunner().invoke(main, ["cache", "repair", str(tmp_path / "run.yaml")]).exit_code == 0
    resumes(trainings, run, 4)


# A clock that is set.


@FEW_STEPS_ARE_LOST
def test_a_clock_that_jumps_takes_nothing_over_and_makes_no_negative_time(trainings, meanwhile, monkeypatch):
    run, hours, real = unstarted(trainings), itertools.cycle([0, 5, -7, 26, -48]), time.time
    seen: list[str] = []

    def look() -> None:
        with RunClaim(run.output, "lookonce train") as other, pytest.raises(RunFolderError, match="is in use by"):
            other.take()
        seen.append(find_training(RunFolder(run.output), run.cache.claim_s).state)

    def from_the_future(checkpoint: Path) -> None:
        os.utime(checkpoint, (real() + 3600 * (50 - len(seen)),) * 2)
        look()

    meanwhile(6, look, from_the_future)
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * next(hours))
    summary = train(run, **QUIET)
    monkeypatch.undo()
    assert seen == ["running"] * 4 and trainings.checkpoints(run) == [8, 12]
    assert 0 < RunFolder(run.output).read_trained().seconds < 3600
    times = [*summary.startup_seconds.values(), summary.to_json()["train_seconds"]]
    for line in map(json.loads, (run.output / "log.jsonl").read_text().splitlines()):
        times += [line[name] for name in ("eta_seconds", "samples_per_second", "wait_share") if name in line]
    progress = json.loads((run.output / "progress.json").read_text())
    times += [progress[name] for name in ("stepped_s", "ms_per_sample")]
    assert all(0 <= value < 1e5 for value in times)
    trainings.assert_same_adapter(run, undisturbed(trainings))


# A folder that may not be written to.


def test_a_read_only_folder_is_refused_before_anything_is_loaded_or_answered(make_cached_run, small_disk, monkeypatch):
    run = make_cached_run(output=str(small_disk.folder / "run"), train={"steps": 1})
    new = make_cached_run(output=str(small_disk.folder / "runs" / "a"))
    train(run, **QUIET)
    new.output.parent.mkdir()
    small_disk.make_read_only()
    for name in ("run.open.read_splits", "train.train.load_without_tower", "eval.run.load_trained"):
        monkeypatch.setattr(f"lookonce.{name}", pytest.fail)
    with pytest.raises(RunFolderError, match=rf"cannot write to {new.output} \(Read-only file system\); .*`output`"):
        train(new, **QUIET)
    with pytest.raises(RunFolderError, match=rf"cannot write to {run.output} \(Read-only file system\)"):
        evaluate_run(run.output)
