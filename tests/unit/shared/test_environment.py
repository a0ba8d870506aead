"""The command that calls this program again, and the ranks that torchrun started."""

from __future__ import annotations

import gc

import pytest

from lookonce import environment
from lookonce.environment import launch_note, program, without_garbage_collection
from lookonce.errors import UsageError


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


@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_a_part_of_what_torchrun_sets_is_named_with_how_to_unset_it(monkeypatch, names):
    """It is an error if libraries would wait for other processes, and a note if it has no effect."""
    for name in VALUES:
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, VALUES[name])
    try:
        message = launch_note()
    except UsageError as error:
        message = str(error)
        assert "torchrun --nproc-per-node" in message
    else:
        assert not {"WORLD_SIZE", "LOCAL_RANK"} & {*names} and "has no effect" in message
    assert ", ".join(f"{name}={VALUES[name]}" for name in names) in message
    assert f"unset {' '.join(names)}" in message


@pytest.mark.parametrize(
    ("variables", "said"),
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
def test_what_a_job_system_has_left_is_named_if_it_matters(monkeypatch, variables, said):
    for name in (*VALUES, "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    try:
        message = launch_note()
    except UsageError as error:
        message = str(error)
    assert said in message and bool(said) == bool(message)


@pytest.mark.parametrize("many", [100, 10**9])
def test_very_many_objects_are_left_out_of_later_searches_for_cycles(monkeypatch, many):
    monkeypatch.setattr(environment, "MANY_OBJECTS", many)
    before = gc.get_freeze_count()  # of imported modules; to search through them takes a second
    with without_garbage_collection():
        assert not gc.isenabled()
        objects = [[number] for number in range(1000)]
    assert gc.isenabled() and (gc.get_freeze_count() - before > len(objects)) == (many < 1000)
