"""A real Slurm on this machine with two virtual nodes of two fake GPUs each, and project folders to submit from.

Slurm is started once. Without Slurm the tests are skipped, or fail if CI is set.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from safetensors.torch import load_file

from lookonce.run.config import RunFile

HERE = Path(__file__).parent
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
TIMEOUT_S = 240
MEGABYTE = 20_000
"""The value of slow_lookonce.py."""
KINDS = ("cache", "finalize", "train", "eval", "report", "study")
BY_HAND = """
from pathlib import Path
from lookonce.run import open as content
from lookonce.run.open import TO_BUILD, open_run
from lookonce.workflow import train
from lookonce.run.config import read_run_file
content.MEGABYTE = {megabyte}
run = read_run_file(Path("run.yaml"))
open_run(run, TO_BUILD).build()
train(run)
"""
"""Builds the cache and trains in one process, which takes half as long as two processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slurm")


@dataclass(frozen=True)
class Slurm:
    """The cluster as its users see it."""

    root: Path
    environment: dict[str, str]

    def ask(self, *words: str, cwd: Path | None = None) -> str:
        """Run a command that must succeed; its stdout."""
        done = subprocess.run(words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def jobs(self, job: str) -> list[dict[str, str]]:
        """Slurm's facts about a job, or about each task of an array."""
        lines = self.ask("scontrol", "show", "job", "-o", job).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def states(self, job: str) -> set[str]:
        return {facts["JobState"] for facts in self.jobs(job)}

    def wait(self, *jobs: str) -> None:
        """Wait until these jobs have ended and are not requeued."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        self.until(lambda: all(self.states(job) <= final for job in jobs))

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until the condition is true; its value."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := condition()):
            assert time.monotonic() < deadline, self.ask("scontrol", "show", "job", "-o")
            time.sleep(0.2)
        return found

    def slurmd(self, node: str) -> int:
        return int((self.root / "run" / f"slurmd-{node}.pid").read_text())


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
    if missing:
        message = f"NO SLURM HERE (no {', '.join(missing)}): slurm/ is not tested; install Slurm with: make slurm-test"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    root = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    root.chmod(0o755)  # munge's socket must be accessible
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "LOOKONCE"))}
    environment = clean | {"SLURM_CONF": str(root / "etc" / "slurm.conf")}
    knobs = {"SLURM_CI_ROOT": str(root), "SLURM_CI_MAXARRAY": "5", "SLURM_CI_PORT": str(20000 + os.getpid() % 10000)}
    cluster = [str(HERE / "cluster.sh")]
    subprocess.run([*cluster, "start"], env=clean | knobs, check=True, timeout=90, stdout=subprocess.DEVNULL)
    yield Slurm(root, environment)
    subprocess.run([*cluster, "clean"], env=clean | knobs, check=True, timeout=90)


@dataclass(frozen=True)
class Project:
    """A user's folder: slurm/ from the clone, site settings, a run file, and no logs/ yet."""

    folder: Path
    slurm: Slurm

    def submit(self, *options: str, script: str = "submit.sh", file: str = "run.yaml") -> CompletedProcess[str]:
        command = [str(self.folder / "slurm" / script), file, *options]
        environment = self.slurm.environment
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    def sbatch(self, kind: str, *arguments: str, options: str = "") -> str:
        (self.folder / "logs").mkdir(exist_ok=True)
        script = self.folder / "slurm" / f"{kind}.sbatch"
        options = f"--cpus-per-task=1 --mem=500M {options}"
        return self.slurm.ask("sbatch", "--parsable", *options.split(), str(script), *arguments, cwd=self.folder)

    def set_knobs(self, **knobs: Any) -> None:
        (self.folder / "knobs.json").write_text(json.dumps(knobs))

    def log(self, kind: str) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "logs").glob(f"lookonce-{kind}-*")))

    @property
    def shards(self) -> dict[str, tuple[int, int]]:
        """The finished shards by name, with the inode and modification time of their receipts."""
        found = {path.stem: path.stat() for path in (self.folder / "caches").glob("*/receipts/*.json")}
        return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}

    def has_features_of(self, other: Project) -> bool:
        return same(*(read(project.folder.glob("caches/*/shards/*.safetensors")) for project in (self, other)))

    def has_adapter_of(self, other: Project) -> bool:
        return same(*(read(project.folder.glob("runs/a/adapter/*.safetensors")) for project in (self, other)))

    def empty(self) -> Project:
        """Remove the shards of the cache and keep its plan."""
        for path in self.folder.glob("caches/*/[rs]*/shard-*"):
            path.unlink()
        return self


def read(paths: Iterable[Path]) -> dict[str, Any]:
    return {name: value for path in paths for name, value in load_file(path).items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return (
        bool(found)
        and found.keys() == expected.keys()
        and all((found[name] == value).all() for name, value in expected.items())
    )


@pytest.fixture(scope="session")
def make_project(
    slurm: Slurm, sample: Path, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Project]:
    """Makes projects; `site` holds additional lines for site.env, `like` is a project whose cache is copied."""

    def make(name: str, site: str = "", like: Project | None = None, **train: Any) -> Project:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(HERE.parents[1] / "slurm", folder / "slurm", ignore=shutil.ignore_patterns("site.env"))
        (folder / "bin").mkdir()
        program = folder / "bin" / "lookonce"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / "slow_lookonce.py"} "$@"\n')
        program.chmod(0o755)
        small = "".join(f'LOOKONCE_{kind.upper()}_OPTIONS="--cpus-per-task=1 --mem=500M"\n' for kind in KINDS)
        source = f"export PATH={folder / 'bin'}:$PATH PYTHONPATH={HERE.parents[1] / 'src'} LOOKONCE_VENV=none\n"
        (folder / "slurm" / "site.env").write_text(f"{source}export LOOKONCE_STAGGER_S=0\n{small}{site}")
        questions = str(sample / "test.jsonl")
        run = make_run_in(
            folder,
            data={"train": questions, "val": [], "test": questions},
            cache={"dir": "caches"},
            lora={"dropout": 0.1},
            train={"steps": 3} | train,
            eval={"max_new_tokens": 2, "split": "test", "tokens_per_batch": 600},
            output="runs/a",
        )
        (folder / "run.yaml").write_text(run.to_yaml())
        if like:
            shutil.copytree(like.folder / "caches", folder / "caches")
        project = Project(folder, slurm)
        project.set_knobs()
        return project

    return make


@pytest.fixture(scope="session")
def undisturbed(make_project: Callable[..., Project], root: Path) -> Project:
    """A run without Slurm and without interruption."""
    project = make_project("undisturbed", steps=30, save_steps=100)
    program = [sys.executable, "-c", BY_HAND.format(megabyte=MEGABYTE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    subprocess.run(program, cwd=project.folder, env=environment, check=True, capture_output=True)
    return project
