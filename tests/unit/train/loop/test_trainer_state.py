"""Only a state that Trainer can have written is read; what is wrong is named with its file and its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from lookonce.errors import RunFolderError
from lookonce.train.loop.checkpoints import State, read_state


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
