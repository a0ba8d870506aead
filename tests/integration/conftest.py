"""Trainings to interrupt, and what became of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lookonce.run.config import RunFile
from lookonce.run.inputs import Inputs
from lookonce.workflow.train import train


@dataclass
class Trainings:
    """Of two epochs and a bit, with dropout, which draws from the random state, and some forward passes a step."""

    make_run: Callable[..., RunFile]
    sample: Path
    folder: Path
    """Of those that are not interrupted."""
    whole_ones: dict[str, RunFile]

    num_steps, steps_an_epoch = 24, 11

    def options(self, mode: str, **train: Any) -> dict[str, Any]:
        questions = str(self.sample / "test.jsonl")
        return {
            "data": {"train": questions, "val": questions, "test": []},
            "cache": {"dir": str(self.folder / "caches")},
            "batch": {"mode": mode, "samples_per_forward": 3, "tokens_per_pack": 400},
            "train": {"steps": self.num_steps, "save_steps": 4, "eval_steps": 3} | train,
            "lora": {"dropout": 0.1},
            "eval": {"split": "test"},
        }

    def whole(self, mode: str, **train_options: Any) -> RunFile:
        """A run that was trained without interruption."""
        name = f"{mode} {train_options}"
        if name not in self.whole_ones:
            output = str(self.folder / str(len(self.whole_ones)))
            self.whole_ones[name] = run = self.make_run(output=output, **self.options(mode, **train_options))
            Inputs.open(run).build()
            train(run, notify=lambda note: None)
        return self.whole_ones[name]

    def parts(self, mode: str, **train_options: Any) -> RunFile:
        """The same, not begun, in the test's own folder."""
        self.whole(mode)
        return self.make_run(**self.options(mode, **train_options))

    @staticmethod
    def adapter(run: RunFile) -> dict[str, torch.Tensor]:
        return load_file(run.output / "adapter" / "adapter_model.safetensors")

    def assert_same_adapter(self, run: RunFile, other: RunFile) -> None:
        found, expected = self.adapter(run), self.adapter(other)
        assert found.keys() == expected.keys()
        assert all((found[name] == weight).all() for name, weight in expected.items())

    @staticmethod
    def log(run: RunFile) -> list[list[Any]]:
        """What was logged, without what the clock says."""
        lines = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
        return [[line.get(name) for name in ("step", "epoch", "loss", "eval_loss", "grad_norm")] for line in lines]

    @staticmethod
    def checkpoints(run: RunFile) -> list[int]:
        return sorted(int(path.name.rpartition("-")[2]) for path in (run.output / "checkpoints").glob("checkpoint-*"))


@pytest.fixture(scope="session")
def whole_trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, RunFile]]:
    return tmp_path_factory.mktemp("whole"), {}


@pytest.fixture
def trainings(
    make_run: Callable[..., RunFile], sample: Path, whole_trainings: tuple[Path, dict[str, RunFile]]
) -> Trainings:
    return Trainings(make_run, sample, *whole_trainings)


@pytest.fixture(scope="module")
def whole_products() -> Iterator[None]:
    """float32 products are not rounded to TensorFloat-32, which a training before may have allowed for good."""
    places = (torch.backends, torch.backends.cuda.matmul)
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    yield
    for place, precision in zip(places, before, strict=True):
        place.fp32_precision = precision
