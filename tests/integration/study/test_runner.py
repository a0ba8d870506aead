"""A process that stays: each command in it gives what the same command gives in a process of its own."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lookonce.datasets.sample.model import write_model
from lookonce.families.lookup import FAMILIES
from lookonce.run.config import RunFile
from lookonce.study.pool import Job, Runner

SERVE = """
import json, sys, warnings
from multiprocessing import Pipe
from lookonce import runner
mine, theirs = Pipe()
for words in sys.argv[1:]:
    mine.send((words.split(), "log"))
mine.close()
PLANT
runner.serve(theirs)
"""
"""Runs commands one after another, with their output in `log`."""
OUT_OF_MEMORY = """
import torch
from lookonce.train.loop.trainer import PackTrainer
step = PackTrainer.training_step
def fails_once(self, model, *args):
    if self.state.global_step == 2 and self.args.seed == 9:
        raise torch.OutOfMemoryError("planted")
    return step(self, model, *args)
PackTrainer.training_step = fails_once
torch.cuda.get_device_properties = lambda device: type("Gpu", (), {"total_memory": 10**9})
"""


@pytest.fixture
def write_run(make_cached_run: Callable[..., RunFile], sample: Path, tmp_path: Path) -> Callable[..., None]:
    """Writes the run file of a run on a few records of the sample."""
    lines = (sample / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:12]))
    few = {split: str(tmp_path / "few.jsonl") for split in ("train", "val", "test")} | {"image_root": str(sample)}

    def write(name: str, **changes: Any) -> None:
        train = {"steps": 3} | changes.pop("train", {})
        run = make_cached_run(**{"data": few, "output": str(tmp_path / name), "train": train} | changes)
        (tmp_path / f"{name}.yaml").write_text(run.to_yaml())

    return write


def results(folder: Path) -> dict[str, Any]:
    """All numbers of a run that do not depend on time: hashes of adapter and answers, and what was logged."""
    timed = ("time", "seconds", "second")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    logged = [{key: value for key, value in line.items() if not key.endswith(timed)} for line in lines]
    for line in logged:
        line.pop("wait_share", None)
    files = [folder / "adapter" / "adapter_model.safetensors", *sorted((folder / "predictions").glob("*.jsonl"))]
    return {"log": logged} | {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.guarantee(
    "A run of a study equals one in a process of its own, whatever ran in its process before, bit for bit."
)
def test_commands_one_after_another_give_what_each_gives_alone(preloaded, write_run, tmp_path):
    """Runs with other ranks, seeds, losses, precisions, frozen weights and families stand between two alike."""
    family = FAMILIES["qwen3_5"]  # with linear attention, and modules that transformers has in another module
    write_model(tmp_path / "model", family=family)
    whole = {"rank": 8, "modules_to_save": ["embed_tokens"]}
    other = {"rank": 2, "dropout": 0.2, "targets": ["q_proj", "v_proj"]}
    runs: dict[str, dict[str, Any]] = {
        "first": {"lora": whole},
        "other": {"lora": other, "batch": {"mode": "separate", "loss": "sample"}, "train": {"seed": 5}},
        "again": {"lora": whole, "train": {"seed": 3}},
        "family": {
            "model": {"path": str(tmp_path / "model")},
            "cache": {"dir": str(tmp_path / "caches")},
            "train": {"precision": "bf16", "optimizer": "adamw_torch", "max_grad_norm": 0.1},
        },
        "last": {"lora": whole, "train": {"seed": 4}},
    }
    for place in ("kept", "alone"):
        (tmp_path / place).mkdir()
        for name, changes in runs.items():
            write_run(f"{place}/{name}", **changes)
    steps = ["train X/first.yaml", "train X/other.yaml", "eval --split test X/other.yaml", "train X/again.yaml"]
    steps += ["cache build X/family.yaml", "train X/family.yaml", "train X/last.yaml"]
    kept = [step.replace("X", "kept") for step in steps]
    process = preloaded.start(SERVE.replace("PLANT", ""), *kept, folder=tmp_path)
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert "a new process" not in (tmp_path / "log").read_text()
    main = "import sys; from lookonce.cli import main; main(sys.argv[1:])"
    for step in steps:
        alone = preloaded.start(main, *step.replace("X", "alone").split(), folder=tmp_path)
        assert alone.wait() == 0, alone.error
    for name in runs:
        assert results(tmp_path / "kept" / name) == results(tmp_path / "alone" / name), name


@pytest.mark.guarantee(
    "A run of a study equals one in a process of its own, whatever ran in its process before, bit for bit."
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_commands_on_a_gpu_stay_in_their_process_and_give_what_each_gives_alone(preloaded, write_run, tmp_path):
    """With compiled layers and captured passes, which change settings of PyTorch that a CPU run leaves alone."""
    kept, alone = (tmp_path / "kept", tmp_path / "alone")
    for place in (kept, alone):
        place.mkdir()
        for seed in (1, 2, 3):
            write_run(f"{place.name}/{seed}", train={"seed": seed, "precision": "bf16", "steps": 6})
    runs = [f"train kept/{seed}.yaml" for seed in (1, 2, 3)]
    process = preloaded.start(SERVE.replace("PLANT", ""), *runs, folder=tmp_path)
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
    assert "a new process" not in (tmp_path / "log").read_text()
    main = "import sys; from lookonce.cli import main; main(sys.argv[1:])"
    for seed in (1, 2, 3):
        process = preloaded.start(main, "train", f"alone/{seed}.yaml", folder=tmp_path)
        assert process.wait(300) == 0, process.error
        assert results(kept / str(seed)) == results(alone / str(seed)), seed


@pytest.mark.guarantee("A run of a study that fails or runs out of memory ends its process, and hurts no other run.")
def test_a_run_out_of_memory_ends_its_process(preloaded, write_run, tmp_path):
    write_run("first")
    write_run("large", train={"seed": 9})
    process = preloaded.start(
        SERVE.replace("PLANT", OUT_OF_MEMORY),
        "train first.yaml",
        "train large.yaml",
        "train first.yaml",
        folder=tmp_path,
    )
    assert process.wait(300) == 1
    log = (tmp_path / "log").read_text()
    assert log.count("Error: out of memory on this GPU of 1.0 GB") == 1 and "is already trained" not in log


def test_a_real_process_takes_commands_until_one_fails(write_run, tmp_path, monkeypatch):
    write_run("run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "click.py").write_text("raise RuntimeError('a file of the user, with the name of a library')")
    runner = Runner({"CUDA_VISIBLE_DEVICES": ""}, tmp_path / "first.log")
    for name, words, code in (
        ("first", ("status", "--missing", "run.yaml"), 0),
        ("second", ("status", "--missing", "run.yaml"), 0),
        ("third", ("status", "nothing.yaml"), 2),
    ):
        words = (*words[:-1], str(tmp_path / words[-1]))
        assert runner.begin(Job(name, words, tmp_path / f"{name}.log"))
        while (ended := runner.poll()) is None:
            time.sleep(0.02)
        assert ended == code
    assert not runner.begin(Job("fourth", ("status", "run.yaml"), tmp_path / "fourth.log"))
    assert [(tmp_path / f"{name}.log").read_text() for name in ("first", "second")] == ["train\neval\n"] * 2
    assert "nothing.yaml does not exist" in (tmp_path / "third.log").read_text()
    runner.close()
    runner.wait()
