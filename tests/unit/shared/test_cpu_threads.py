"""A small model is computed with one thread, by whatever loads it; a number that the user has set stays."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lookonce import environment as settings
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.environment import limit_cpu_threads
from lookonce.run.folder import Environment
from lookonce.run.open import FROM_CACHE, open_run
from lookonce.train.model.load import load_with_tower, load_without_tower


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch starts with two threads, as on a machine with two cores, and nothing is set."""
    for name in settings.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_training_evaluation_and_measurements_of_a_small_model_have_one_thread(make_run, built):
    """All of them open a `OpenRun`, before the run records its environment."""
    open_run(make_run(cache={"dir": str(built.folder.parent)}), FROM_CACHE)
    assert Environment.this().cpu_threads == 1


@pytest.mark.parametrize(
    "load",
    [lambda folder: load_without_tower(folder, torch.float32), lambda folder: load_with_tower(folder, torch.float32)]
    + [lambda folder: Tower(folder, torch.float32)],
    ids=["without tower", "with tower", "tower"],
)
def test_whatever_loads_a_small_model_has_one_thread(sample, load):
    load(ModelFolder.open(str(sample / "model")))
    assert torch.get_num_threads() == 1


def test_a_large_model_keeps_all_threads(tmp_path):
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            os.truncate(file.fileno(), settings.SMALL_BYTES // 2)
    limit_cpu_threads(tmp_path)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", settings.THREADS)
def test_a_number_that_the_user_has_set_stays(sample, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    limit_cpu_threads(sample / "model")
    assert torch.get_num_threads() == 2
