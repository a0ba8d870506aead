"""What `train.frozen` names, and what it needs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.model.frozen import check_frozen, model_settings


def run_with(evaluation: dict[str, str] | None = None, **train: str) -> RunFile:
    sections = {"train": train, "eval": evaluation or {}}
    return RunFile.model_validate({"model": {"path": "m"}, "data": {"train": "a"}, "output": "b"} | sections)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("frozen", ["int8", "nf4"])
def test_a_missing_package_is_an_error_that_names_the_command(nothing_installed, frozen):
    with pytest.raises(UsageError, match=rf"frozen: {frozen} needs bitsandbytes.*: pip install 'lookonce\[qlora\]'"):
        check_frozen(frozen)
    with pytest.raises(UsageError, match=rf"^train.frozen: {frozen} needs bitsandbytes"):
        training_arguments(run_with(frozen=frozen), Path("checkpoints"))


def test_answers_depend_on_quantised_weights_and_earlier_hashes_stay():
    assert model_settings(run_with()) == ["bf16", "sdpa"]
    assert model_settings(run_with(frozen="nf4")) == ["bf16", "sdpa", "nf4"]
