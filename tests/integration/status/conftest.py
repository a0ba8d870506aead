"""A finished run, and a run that a test can bring into any state."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lookonce.claim_file import Process
from lookonce.files import write_json
from lookonce.run.config import RunFile
from lookonce.run.log_file import Progress
from lookonce.run.open import TO_BUILD, open_run
from lookonce.status import State, find_state
from lookonce.workflow import train

ME = Process.this()
NUM_STEPS = 2


@pytest.fixture(scope="session")
def trained(built, make_run_in, tmp_path_factory) -> RunFile:
    """A finished run on the sample. Tests must not write to it."""
    run = make_run_in(
        tmp_path_factory.mktemp("trained"),
        cache={"dir": str(built.folder.parent)},
        train={"steps": NUM_STEPS, "save_steps": 1},
        eval={"max_new_tokens": 1},
    )
    train(run, notify=lambda note: None)
    return run


@dataclass
class Site:
    """A run with its own data, cache and output, in any state."""

    folder: Path
    run: RunFile
    trained: RunFile
    me: Process = ME
    num_steps: int = NUM_STEPS

    def plan(self) -> None:
        open_run(self.run, TO_BUILD).write_plan()

    def cache(self) -> None:
        others = shutil.ignore_patterns("user-*")  # tests that use the cache now
        shutil.copytree(self.trained.cache.dir, self.run.cache.dir, dirs_exist_ok=True, ignore=others)

    def train(self, *removed: str) -> None:
        """As after training here, without the files that are `removed`."""
        shutil.copytree(self.trained.output, self.run.output)
        for name in removed:
            for path in self.run.output.glob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def begin(self) -> None:
        """As before the first step of a training."""
        self.train(*{path.name for path in self.trained.output.iterdir()} - {"run.json", "run.yaml"})

    def remove(self, pattern: str) -> None:
        [path] = self.run.cache.dir.glob(f"*/{pattern}")
        path.unlink()

    def writes_progress(self, **values: Any) -> None:
        """Write `progress.json` as a training does."""
        self.run.output.mkdir(exist_ok=True)
        progress = Progress(ME, 0.0, "training", step=1, num_steps=NUM_STEPS, loss=0.5, ms_per_sample=2.0, eta_s=9.0)
        write_json(self.run.output / "progress.json", asdict(replace(progress, **values)))

    def read(self) -> State:
        return find_state(self.run)

    def finish(self) -> None:
        """As after a whole run."""
        self.cache()
        self.train()

    def lose_a_shard(self) -> None:
        """As with a cache whose second shard is not built."""
        self.cache()
        self.remove("receipts/shard-00001.json")
        self.remove("shards/shard-00001.safetensors")


@pytest.fixture
def site(make_run, sample, trained, tmp_path) -> Site:
    shutil.copytree(sample, tmp_path / "data", ignore=shutil.ignore_patterns("model"))
    data = {split: str(tmp_path / "data" / f"{split}.jsonl") for split in ("train", "val", "test")}
    sections = trained.model_dump(mode="json", include={"lora", "batch", "train", "eval"})
    return Site(tmp_path, make_run(data=data, **sections), trained)


@pytest.fixture
def run_file(site) -> Path:
    path = site.folder / "run.yaml"
    path.write_text(site.run.to_yaml())
    return path
