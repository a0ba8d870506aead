"""What a process that runs several commands puts back, keeps and forgets between them, and when it ends."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.utils.import_utils import enable_tf32

from lookonce import runner
from lookonce.run import startup
from lookonce.run.config import RunFile
from lookonce.run.sections import TrainSection
from lookonce.train.model import load, packs


class Commands:
    """Hands out words of commands, and notes what comes back."""

    def __init__(self, *words: tuple[str, ...]) -> None:
        self.words, self.answers = [*words], []

    def recv(self) -> tuple[tuple[str, ...], str]:
        if not self.words:
            raise EOFError
        return self.words.pop(0), "log"

    def send(self, answer: bool) -> None:
        self.answers.append(answer)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Serves functions as commands with these words; returns after how many the process was ready for another one."""
    monkeypatch.setattr(startup, "_began", None)
    monkeypatch.setattr(load, "_kept", None)
    monkeypatch.setattr(runner, "gc", SimpleNamespace(unfreeze=int, collect=int, freeze=int))  # pytest has its own plan

    def serve(*functions: Callable[[], Any], words: tuple[tuple[str, ...], ...] = ()) -> int:
        left = [*functions]
        monkeypatch.setattr(runner, "run", lambda words, log: left.pop(0)())
        commands = Commands(*(words or [("train", "no.yaml")] * len(functions)))
        runner.serve(commands)
        return len(commands.answers)

    return serve


def draw() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]


CHANGES: dict[str, Callable[[], Any]] = {
    "environment": lambda: os.environ.update(NEW="1", HOME="/"),
    "threads": lambda: torch.set_num_threads(3),
    "tf32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "tf32 of products, as torch.compile leaves it": lambda: [
        setattr(torch.backends, "fp32_precision", "tf32"),
        setattr(torch.backends.cuda.matmul, "fp32_precision", torch.backends.cuda.matmul.fp32_precision),
    ],
    "tf32 by its former name": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32 of a library": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
    "seeds": lambda: [random.seed(1), np.random.seed(1), torch.manual_seed(1)],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_command_changes_is_put_back(serve, change):
    drawn, seen = [], []

    def look() -> None:
        precisions = [torch.get_float32_matmul_precision(), torch.backends.fp32_precision]
        precisions += [each.fp32_precision for each in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)]
        seen.append([dict(os.environ), torch.get_num_threads(), precisions])
        drawn.append(draw())

    assert serve(look, change, look) == 3
    assert seen[0] == seen[1] and drawn[0] == drawn[1]


def test_each_command_can_ask_for_tf32(serve):
    seen = []

    def train() -> None:
        enable_tf32(True)
        seen.append([each.fp32_precision for each in (torch.backends, torch.backends.cuda.matmul)])

    assert serve(train, train) == 2 and seen == [["tf32", "tf32"]] * 2
    assert torch.backends.fp32_precision == "none"


LEFT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "the handlers of signals": (
        lambda: signal.signal(signal.SIGUSR1, print),
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
    ),
    "flags of PyTorch (default data type)": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "flags of PyTorch (gradients)": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "flags of PyTorch (flash attention)": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_put_back_ends_the_process(serve, capsys, name):
    change, undo = LEFT[name]
    try:
        assert serve(change, pytest.fail) == 0
    finally:
        undo()
    assert f"the next command of the study gets a new process, because of {name}\n" in capsys.readouterr().err


def test_a_failed_command_ends_the_process_with_its_code(serve):
    with pytest.raises(SystemExit, match="75"):
        serve(lambda: None, lambda: sys.exit(75), pytest.fail)


@pytest.mark.parametrize(("num_bytes", "number"), [(1 << 20, 2), (1 << 29, 0)])
def test_memory_of_the_gpu_that_is_not_freed_ends_the_process(serve, monkeypatch, num_bytes, number):
    freed = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: freed.append(name))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: num_bytes)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert serve(lambda: None, lambda: None) == number and freed[:2] == ["empty_cache", "reset_peak_memory_stats"]


@pytest.mark.parametrize(
    ("section", "number"),
    [
        *(({"train": {"track": [tracker]}}, number) for tracker, number in (("wandb", 0), ("tensorboard", 2))),
        ({"train": {"track": ["mlflow"]}}, 0),
        ({"eval": {"metric": "my_scores:grade"}}, 0),  # its module may change before the next command
        ({"eval": {"metric": "token_f1"}}, 2),
        ({"grpo": {"reward": {"exact_match": 1.0, "my_scores:grade": 1.0}}}, 0),
    ],
    ids=str,
)
def test_what_keeps_state_in_its_process_gets_one_of_its_own(serve, make_run, tmp_path, section, number):
    (tmp_path / "run.yaml").write_text(make_run(**section).to_yaml())
    words = ("train", str(tmp_path / "run.yaml"))
    assert serve(lambda: None, lambda: None, words=(words, words)) == number


def test_compiled_code_is_kept_for_the_same_settings_only(serve, make_run, tmp_path, monkeypatch):
    """Seeds, data, lengths and learning rates may differ; another rank or another command may not."""
    forgot: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: forgot.append(len(done)))
    done: list[None] = []
    alike = {"train": {"seed": 3, "steps": 9, "learning_rate": 0.1}, "data": {"val": []}, "output": "other"}
    words = []
    for name, changes in {"a": {}, "b": alike, "c": {"lora": {"rank": 2}}}.items():
        (tmp_path / f"{name}.yaml").write_text(make_run(**changes).to_yaml())
        words.append(("train", str(tmp_path / f"{name}.yaml")))
    words = (*words, words[-1], ("eval", words[-1][1]))
    packs._MASKS[torch.device("meta"), True] = SimpleNamespace()
    assert serve(*[lambda: done.append(None)] * 5, words=words) == 5
    assert forgot == [0, 2, 4] and not packs._MASKS
    assert runner.FREE.keys() < RunFile.model_fields.keys() and runner.FREE["train"] < TrainSection.model_fields.keys()


def test_the_age_of_a_process_begins_again_with_each_command(serve):
    ages: list[float] = []
    serve(lambda: ages.append(startup.process_age()), lambda: ages.append(startup.process_age()))
    assert ages[0] > ages[1] and ages[1] < 0.5  # the first began with the process


def test_a_copy_of_the_kept_model_shares_its_weights_and_nothing_else():
    kept = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    kept["two"].weight = kept["one"].weight  # tied
    kept.register_buffer("sizes", torch.ones(2))
    copy = load.copied(kept)
    assert copy["one"].weight is copy["two"].weight and copy["one"].weight is not kept["one"].weight
    assert copy["one"].weight.data_ptr() == kept["one"].weight.data_ptr() and not copy["one"].weight.requires_grad
    copy["one"].weight.data = torch.zeros(3, 3)
    copy["one"].extra, copy.sizes[0] = 1, 7
    assert kept["one"].weight.any() and kept.sizes.tolist() == [1, 1] and not hasattr(kept["one"], "extra")


def test_a_model_is_kept_until_its_files_change(monkeypatch, sample_model, model: Path):
    loaded: list[tuple[Any, ...]] = []
    load_files = load._load_files

    def load_noted(*args: Any) -> Any:
        loaded.append(args[2:])
        return load_files(*args)

    monkeypatch.setattr(load, "_load_files", load_noted)
    monkeypatch.setattr(load, "_kept", None)
    monkeypatch.setattr(startup, "_began", None)
    folder = type(sample_model).open(str(model))

    def load_one(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        return dict(load.load_without_tower(folder, dtype).named_parameters())

    first, _ = load_one(), load_one()
    assert len(loaded) == 2 and load._kept is None  # a process of one command keeps nothing
    startup.begin_command()
    again, third = load_one(), load_one()
    assert len(loaded) == 3 and all(torch.equal(first[name], again[name]) for name in first)
    assert all(again[name].data_ptr() == third[name].data_ptr() for name in first)
    load_one(torch.bfloat16), load_one()
    assert len(loaded) == 5  # of two models the last is kept
    os.utime(next(model.glob("*.safetensors")), (1, 1))
    load_one()
    assert len(loaded) == 6
