"""The command that calls this program again, and the ranks that torchrun started."""

from __future__ import annotations

import gc

import pytest

from lookonce import environment
from lookonce.environment import local_rank, num_ranks, program, rank, without_garbage_collection


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


@pytest.mark.parametrize(
    ("variables", "expected"), [({}, (0, 1, 0)), ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1))]
)
def test_ranks_are_those_of_torchrun(monkeypatch, variables, expected):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (rank(), num_ranks(), local_rank()) == expected


@pytest.mark.parametrize("many", [100, 10**9])
def test_very_many_objects_are_left_out_of_later_searches_for_cycles(monkeypatch, many):
    monkeypatch.setattr(environment, "MANY_OBJECTS", many)
    before = gc.get_freeze_count()  # of imported modules; to search through them takes a second
    with without_garbage_collection():
        assert not gc.isenabled()
        objects = [[number] for number in range(1000)]
    assert gc.isenabled() and (gc.get_freeze_count() - before > len(objects)) == (many < 1000)
