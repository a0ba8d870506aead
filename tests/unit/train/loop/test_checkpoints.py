"""A checkpoint is whole, or not used; old ones are deleted by their step; a state is one that Trainer can write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState

from lookonce.errors import RunFolderError, TrainingError
from lookonce.run.folder import CHECKSUMS, STATE, RunFolder
from lookonce.train.loop.checkpoints import (
    OTHER_BYTES,
    State,
    best_checkpoint,
    check_undamaged,
    checkpoint_bytes,
    damaged_files,
    delete,
    delete_old,
    find_checkpoint,
    read_state,
    saving,
)

FILES = {"adapter_model.safetensors": "weights", "optimizer.pt": "moments", "scheduler.pt": "rate", STATE: "{}"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def place(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / f"checkpoint-{step}"


def write(folder: RunFolder, step: int) -> Path:
    checkpoint = place(folder, step)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    with saving(checkpoint, 1000):
        for name, text in FILES.items():
            (checkpoint / name).write_text(text)
    return checkpoint


def found(folder: RunFolder) -> tuple[str | None, list[str]]:
    """The name of the checkpoint to resume from, and the notes on damaged ones."""
    notes: list[str] = []
    checkpoint = find_checkpoint(folder, notes.append)
    return checkpoint and checkpoint.name, notes


def test_a_whole_checkpoint_has_the_checksums_of_all_its_files(folder):
    checkpoint = write(folder, 8)
    assert json.loads((checkpoint / CHECKSUMS).read_text()).keys() == FILES.keys()
    assert damaged_files(checkpoint) == [] and found(folder) == ("checkpoint-8", [])


@pytest.mark.guarantee(
    "A damaged checkpoint is never loaded: a flipped byte in any of its files is named, and the training "
    "resumes from the checkpoint before."
)
@pytest.mark.parametrize("name", [*FILES, CHECKSUMS])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        Path.unlink,
    ],
    ids=["flipped", "cut", "lost"],
)
def test_damage_is_named_and_the_checkpoint_before_is_used(folder, name, damage):
    write(folder, 4)
    damage(write(folder, 8) / name)
    checkpoint, notes = found(folder)
    assert checkpoint == "checkpoint-4"
    if (name, damage) == (STATE, Path.unlink):  # deleted in part
        assert notes == []
    else:
        assert f"{place(folder, 8)} is damaged" in notes[0] and name in notes[0]


def test_if_all_are_damaged_training_starts_again(folder):
    for step in (4, 8):
        (write(folder, step) / "optimizer.pt").write_text("other")
    name, notes = found(folder)
    assert name is None and len(notes) == 3 and "starting at the first step" in notes[-1]
    assert found(RunFolder(folder.folder / "new")) == (None, [])


@pytest.mark.parametrize("num_files", range(len(FILES) + 1))
def test_a_checkpoint_counts_only_when_its_checksums_are_written(folder, num_files):
    write(folder, 4)
    with pytest.raises(KeyboardInterrupt), saving(place(folder, 8), 1000):  # as a kill: nothing is tidied up
        for name in list(FILES)[:num_files]:
            (place(folder, 8) / name).write_text(FILES[name])
        raise KeyboardInterrupt
    assert folder.last_checkpoint == place(folder, 4) and found(folder) == ("checkpoint-4", [])
    write(folder, 8)
    assert found(folder) == ("checkpoint-8", [])


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(folder):
    write(folder, 4)
    with pytest.raises(ValueError), saving(place(folder, 8), 1000):
        (place(folder, 8) / "optimizer.pt").write_text("half")
        raise ValueError
    assert [path.name for path in folder.checkpoints.iterdir()] == ["checkpoint-4"]


@pytest.mark.parametrize("checksums", [None, "{}", "[]", "null", '{"trainer_state.json": "0"}', "all but one"])
def test_a_checkpoint_that_cannot_be_compared_is_damaged(folder, checksums):
    write(folder, 4)
    path = write(folder, 8) / CHECKSUMS
    if checksums is None:
        path.unlink()
    elif checksums == "all but one":
        recorded = json.loads(path.read_text())
        del recorded["optimizer.pt"]
        path.write_text(json.dumps(recorded))
    else:
        path.write_text(checksums)
    (place(folder, 8) / "optimizer.pt").write_text("")
    checkpoint, (note,) = found(folder)
    assert checkpoint == "checkpoint-4" and f"{place(folder, 8)} is damaged" in note


def test_a_file_of_another_program_beside_a_checkpoint_is_no_damage(folder):
    (write(folder, 8) / ".DS_Store").write_text("")
    (place(folder, 8) / "notes.txt").write_text("my best one")
    assert found(folder) == ("checkpoint-8", [])
    (place(folder, 8) / "rng_state.pth").write_text("PyTorch would load it")
    assert found(folder)[0] is None


@pytest.mark.parametrize("num_deleted", [0, 1, 2])
def test_a_checkpoint_that_was_deleted_in_part_is_ignored_in_silence(folder, monkeypatch, num_deleted):
    checkpoint = write(folder, 8)

    def killed(path: Path, **_: object) -> None:
        for name in sorted(FILES)[:num_deleted]:
            (path / name).unlink(missing_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr("lookonce.train.loop.checkpoints.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete(checkpoint)
    assert found(folder) == (None, [])


@pytest.mark.parametrize(
    ("num_kept", "best", "left"),
    [
        (1, None, [20, 24]),
        (2, None, [16, 20, 24]),
        (9, None, [4, 8, 16, 20, 24]),
        (1, 8, [8, 20, 24]),
        (2, 8, [8, 20, 24]),
        (3, 8, [8, 16, 20, 24]),
        (2, 20, [16, 20, 24]),
        (2, 3, [16, 20, 24]),
    ],
)
def test_the_oldest_are_deleted_by_their_step_whatever_the_clock_said(folder, num_kept, best, left):
    for hours, step in enumerate((4, 8, 16, 20, 24)):
        os.utime(write(folder, step), (10**9 - 3600 * hours,) * 2)
    (folder.checkpoints / "checkpoint-12").mkdir()  # of a killed training, without a file
    (folder.checkpoints / "notes").mkdir()
    delete_old(place(folder, 20), best and f"/moved/checkpoints/checkpoint-{best}", num_kept)
    names = {f"checkpoint-{step}" for step in left}
    assert {path.name for path in folder.checkpoints.iterdir()} == names | {"notes"}


def test_a_damaged_best_checkpoint_does_not_become_the_result(folder):
    checkpoint = write(folder, 8)
    check_undamaged(checkpoint)
    (checkpoint / "adapter_model.safetensors").write_text("Weights")
    with pytest.raises(TrainingError, match=r"checkpoint-8, is damaged \(.*: adapter_model.safetensors\); .*--restart"):
        check_undamaged(checkpoint)


def test_the_bytes_of_a_checkpoint_are_those_of_the_weights_and_of_the_optimizer():
    model = torch.nn.Linear(10, 100, bias=False)
    model.register_parameter("frozen", torch.nn.Parameter(torch.zeros(500), requires_grad=False))
    assert checkpoint_bytes(model) == OTHER_BYTES + 4000
    state = {model.weight: {"step": 3, "exp_avg": model.weight, "exp_avg_sq": model.weight}}
    assert checkpoint_bytes(model, SimpleNamespace(state=state)) == OTHER_BYTES + 12000


def record_best(checkpoint: Path, best: str | None) -> None:
    """Let a checkpoint record the best one, as Trainer does."""
    state = {"global_step": 8, "epoch": 1.0, "max_steps": 12, "best_model_checkpoint": best}
    (checkpoint / STATE).write_text(json.dumps(state))


@pytest.mark.parametrize("recorded", ["/gone/run/checkpoints/checkpoint-4", "runs/a/checkpoints/checkpoint-4"])
def test_the_best_checkpoint_is_that_of_the_folder_where_the_last_one_lies(folder, recorded):
    best, last = write(folder, 4), write(folder, 8)
    record_best(last, recorded)
    assert best_checkpoint(last) == best
    record_best(last, None)
    assert best_checkpoint(last) is None


@pytest.mark.parametrize(
    "recorded",
    ["/gone/checkpoint-4", "/gone/checkpoint-6", "/gone/..", "", "a\0", f"checkpoint-{'9' * 5000}", "adapter"],
)
def test_a_best_checkpoint_that_is_missing_or_incomplete_is_named(folder, recorded):
    last = write(folder, 8)
    (write(folder, 6) / CHECKSUMS).write_text("")
    write(folder, 5).rename(folder.checkpoints / "adapter")
    record_best(last, recorded)
    with pytest.raises(RunFolderError, match=r"as the best checkpoint so far, and .*; copy it there, or train again"):
        best_checkpoint(last)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-8"
    folder.mkdir()
    state = TrainerState(epoch=0.5, global_step=8, max_steps=24, log_history=[{"loss": 1.0, "step": 1}])
    state.save_to_json(str(folder / "trainer_state.json"))
    return folder


def change(checkpoint: Path, **fields: Any) -> None:
    path = checkpoint / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_trainer_writes_is_read(checkpoint):
    written = json.loads((checkpoint / "trainer_state.json").read_text())
    state = read_state(checkpoint)
    assert (state.global_step, state.epoch, state.log_history) == (8, 0.5, written["log_history"])
    assert State.model_fields.keys() <= written.keys() and not state.model_extra


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_step", "8"),
        ("global_step", True),
        ("max_steps", 0),
        ("epoch", float("inf")),
        ("save_steps", None),
        ("log_history", [3]),
        ("is_world_process_zero", 1),
        ("best_model_checkpoint", 3),
        ("stateful_callbacks", {"losses": {"logged": "a"}}),
        ("stateful_callbacks", {"losses": {"logged": 1.0, "not_logged": 0.0, "num_steps": -1, "last_logged_step": 0}}),
    ],
    ids=str,
)
def test_a_field_of_another_form_is_named(checkpoint, name, value):
    change(checkpoint, **{name: value})
    with pytest.raises(RunFolderError, match=rf"is broken: `{name}[a-z_.0-9]*`: .*; train again with:"):
        read_state(checkpoint)


def test_a_state_of_another_step_is_refused(checkpoint):
    change(checkpoint, global_step=7)
    with pytest.raises(RunFolderError, match="global_step is 7, expected 8; train again with:"):
        read_state(checkpoint)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "valid dictionary"),
        ("{}", "`global_step`: it is missing"),
        ('{"global_step": 8, "max_steps": 9, "epoch": 1, "__class__": 1}', "Trainer has no field '__class__'"),
        ('{"global', "Unterminated"),
        ("[" * 50_000, "nested too deeply"),
    ],
    ids=["list", "empty", "unknown", "cut", "deep"],
)
def test_a_file_that_is_no_state_is_named(checkpoint, content, said):
    (checkpoint / "trainer_state.json").write_text(content)
    with pytest.raises(RunFolderError, match=f"trainer_state.json is broken.*{said}.*--restart"):
        read_state(checkpoint)
