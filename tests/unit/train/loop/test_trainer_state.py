"""Only a state that Trainer can have written is read; what is wrong is named with its file and its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from lookonce.errors import RunFolderError
from lookonce.train.loop.checkpoints import FORMS, read_state


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
    assert read_state(checkpoint) == json.loads((checkpoint / "trainer_state.json").read_text())
    assert FORMS.keys() <= read_state(checkpoint).keys()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("global_step", "8", r"'8', expected a whole number above 0"),
        ("global_step", 7, "7, expected 8"),
        ("global_step", True, "True, expected a whole"),
        ("max_steps", 0, "0, expected a whole number above 0"),
        ("max_steps", 2.5, "2.5, expected a whole"),
        ("epoch", 0, "0, expected a number above 0"),
        ("epoch", float("inf"), "inf, expected a number above 0"),
        ("save_steps", None, "None, expected a number of 0 or more"),
        ("train_batch_size", [], r"\[\], expected a whole number of 0 or more or null"),
        ("log_history", {"loss": 1}, "expected a list of objects"),
        ("log_history", [3], "expected a list of objects"),
        ("is_world_process_zero", 1, "1, expected true or false"),
        ("best_model_checkpoint", 3, "3, expected a text or null"),
        ("stateful_callbacks", [1], r"\[1\], expected an object"),
        ("stateful_callbacks", {"losses": {"logged": "a"}}, "expected an object, with numbers in its losses"),
    ],
    ids=str,
)
def test_a_field_of_another_form_is_named(checkpoint, name, value, said):
    change(checkpoint, **{name: value})
    with pytest.raises(RunFolderError, match=f"trainer_state.json is broken: {name} is .*{said}.*; train again with:"):
        read_state(checkpoint)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", r"it holds \[1\], expected an object"),
        ("{}", "it lacks global_step"),
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
