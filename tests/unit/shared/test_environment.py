"""The process: the command that calls it again, ranks of torchrun, CPU threads, and the commit of the code."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lookonce import environment, version
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.environment import (
    bytecode_note,
    launch_note,
    limit_cpu_threads,
    one_cpu_thread,
    program,
    without_garbage_collection,
)
from lookonce.errors import UsageError
from lookonce.run.folder import Environment
from lookonce.run.open import FROM_CACHE, open_run
from lookonce.train.model.load import load_with_tower, load_without_tower


@pytest.mark.parametrize(
    ("called", "on_path", "expected"),
    [
        ("bin/lookonce", False, "bin/lookonce"),
        ("bin/lookonce", True, "lookonce"),
        ("somewhere/pytest", False, "lookonce"),
    ],
)
def test_the_next_command_can_be_run_as_printed(tmp_path, monkeypatch, called, on_path, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lookonce").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if on_path else "")
    monkeypatch.setattr("sys.argv", [called])
    assert program() == expected


VALUES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SUBSETS = [("RANK",), ("WORLD_SIZE", "LOCAL_RANK"), ("RANK", "LOCAL_RANK", "MASTER_PORT"), ("MASTER_ADDR",)]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], tuple[str, bool]]:
    """The note about these variables alone, and whether it is an error."""

    def said(variables: dict[str, str]) -> tuple[str, bool]:
        for name in (*VALUES, "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_STEP_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            return launch_note(), False
        except UsageError as error:
            return str(error), True

    return said


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_a_part_of_what_torchrun_sets_is_named_with_how_to_unset_it(said, names):
    """It is an error if libraries would wait for other processes, and a note if it has no effect."""
    message, is_error = said({name: VALUES[name] for name in names})
    assert ("torchrun --nproc-per-node" if is_error else "has no effect") in message
    assert is_error or not {"WORLD_SIZE", "LOCAL_RANK"} & {*names}
    assert ", ".join(f"{name}={VALUES[name]}" for name in names) in message
    assert f"unset {' '.join(names)}" in message


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, ""),
        ({"RANK": "x"}, "RANK='x' in the environment is not a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment is not the number of processes"),
        (VALUES, "waiting for 1 more of 2 processes, because of RANK=0, WORLD_SIZE=2"),
        (VALUES | {"TORCHELASTIC_RUN_ID": "1"}, ""),
        (VALUES | {"RANK": "2"}, "do not fit together"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4 in the environment"),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "SLURM_NTASKS=4 in the environment, but srun did not start"),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}, ""),
    ],
    ids=str,
)
def test_what_a_job_system_has_left_is_named_if_it_matters(said, variables, words):
    message, _ = said(variables)
    assert words in message and bool(words) == bool(message)


@pytest.mark.parametrize("many", [100, 10**9])
def test_very_many_objects_are_left_out_of_later_searches_for_cycles(monkeypatch, many):
    monkeypatch.setattr(environment, "MANY_OBJECTS", many)
    before = gc.get_freeze_count()  # of imported modules; to search through them takes a second
    with without_garbage_collection():
        assert not gc.isenabled()
        objects = [[number] for number in range(1000)]
    assert gc.isenabled() and (gc.get_freeze_count() - before > len(objects)) == (many < 1000)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch starts with two threads, as on a machine with two cores, and nothing is set."""
    for name in environment.THREADS:
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


@pytest.mark.parametrize("load", [load_without_tower, load_with_tower, Tower], ids=lambda load: load.__name__)
def test_whatever_loads_a_small_model_has_one_thread(sample, load):
    load(ModelFolder.open(str(sample / "model")), torch.float32)
    assert torch.get_num_threads() == 1


def test_a_large_model_keeps_all_threads(tmp_path):
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            os.truncate(file.fileno(), environment.SMALL_BYTES // 2)
    limit_cpu_threads(tmp_path)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", environment.THREADS)
def test_a_number_that_the_user_has_set_stays(sample, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    limit_cpu_threads(sample / "model")
    assert torch.get_num_threads() == 2


COMMIT = "c" * 40


@pytest.mark.parametrize("is_set", [True, False])
def test_a_start_that_compiles_libraries_again_is_told_why(tmp_path, monkeypatch, is_set):
    monkeypatch.setattr(sys, "dont_write_bytecode", is_set)
    monkeypatch.setattr(torch.__spec__, "cached", str(tmp_path / "torch.pyc"))
    change = "PYTHONDONTWRITEBYTECODE is set; unset it" if is_set else f"{tmp_path} cannot be written; set PYTHONPY"
    assert f"libraries load slowly, because Python keeps no bytecode of them: {change}" in (bytecode_note() or "")
    (tmp_path / "torch.pyc").touch()
    assert bytecode_note() is None


def test_one_thread_ends_with_the_block():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(ZeroDivisionError), one_cpu_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what pip noted of the installation."""

    def set_note(value: Any) -> None:
        text = value if isinstance(value, str | None) else json.dumps(value)
        monkeypatch.setattr(version, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))

    version.commit.cache_clear()
    yield set_note
    version.commit.cache_clear()


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that git was asked about; it names a commit and changes."""
    asked: list[Path] = []

    def run(command: tuple[str, ...], cwd: Path, **options: Any) -> SimpleNamespace:
        asked.append(cwd)
        return SimpleNamespace(stdout=f"{COMMIT}-dirty\n")

    monkeypatch.setattr("subprocess.run", run)
    return asked


def test_a_commit_that_pip_installed_is_the_one_it_noted(installed, described):
    installed({"url": "https://example.org/lookonce.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    assert version.commit() == COMMIT and described == []


def test_git_is_asked_for_the_commit_of_an_editable_checkout(installed, described, root, tmp_path):
    (tmp_path / "with space").symlink_to(root)
    installed({"url": f"file://{tmp_path}/with%20space", "dir_info": {"editable": True}})
    is_checkout = (root / ".git").exists()
    assert version.commit() == (f"{COMMIT}-dirty" if is_checkout else None)
    assert described == [tmp_path / "with space"] * is_checkout


WHEEL = {"url": "file:///tmp/lookonce.whl", "archive_info": {}}


@pytest.mark.parametrize("note", [None, "{", {"url": "file:///tmp", "dir_info": {"editable": True}}, WHEEL])
def test_without_a_note_of_a_commit_there_is_none(installed, described, note):
    installed(note)
    assert version.commit() is None and described == []


@pytest.mark.parametrize(("processes", "cores"), [(None, 16), ("1", 16), ("3", 5), ("8", 2), ("32", 1)])
def test_the_cores_of_a_machine_are_divided_among_the_processes_of_torchrun(monkeypatch, processes, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    if processes:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert environment.num_cores() == cores
