"""The self-test before a training runs once on each machine, stops what is not exact, and can be switched off."""

from __future__ import annotations

import os
import re

import pytest
import torch

import lookonce.workflow as workflow
from lookonce.errors import TrainingError
from lookonce.selftest.report import ON_GPU, Check, Report, Way
from lookonce.workflow import check_exact, in_own_process, not_exact

HERE = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11.0"}


class Machine:
    """A machine with a GPU, on which some ways are not exact."""

    def __init__(self) -> None:
        self.wrong: tuple[Way, ...] = ()
        self.num_tests = 0
        self.notes: list[str] = []

    def report(self, own: Way) -> Report:
        ways = ON_GPU if own in self.wrong else (own,)
        checks = [Check(f"model, bf16, {way.name}: gradient", float(way in self.wrong), 0.1, way) for way in ways]
        return Report(HERE, tuple(checks), 50)

    def test(self, function) -> Report:
        self.num_tests += 1
        return self.report(function.keywords["own"])

    def check(self, run) -> None:
        check_exact(run, self.notes.append)


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    machine = Machine()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("LOOKONCE_SELFTEST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(workflow, "combination", lambda precision: HERE)
    monkeypatch.setattr(workflow, "in_own_process", machine.test)
    return machine


def test_the_first_training_runs_it_and_later_ones_do_not(machine, make_run):
    for _ in range(3):
        machine.check(make_run())
    assert machine.num_tests == 1
    assert machine.notes == [
        "first training with this GPU, driver and libraries; testing that packs are exact, which takes a minute",
        "packs are exact here: 1 comparison in 50.0 s",
    ]


def test_a_mismatch_names_the_fastest_settings_that_are_exact_and_these_then_train(machine, make_run):
    machine.wrong = (Way(), Way(recorded=False))
    with pytest.raises(TrainingError) as error:
        machine.check(make_run())
    assert str(error.value) == (
        "packs are not exact on this machine: 1 of 1 comparisons with stock rows failed, first of all "
        "model, bf16, compiled, replayed: gradient (differs by 1.0e+00, allowed 1.0e-01); the fastest settings that "
        "are exact: lookonce train RUN.yaml --set train.compile=false; the whole table: lookonce selftest; "
        "LOOKONCE_SELFTEST=off in the environment skips the test"
    )
    machine.check(make_run(train={"compile": False}))
    assert machine.num_tests == 1, "the note says that this way is exact"


def test_a_mismatch_is_tested_again_so_that_a_fault_that_is_gone_stops_nothing(machine, make_run):
    machine.wrong = (Way(),)
    with pytest.raises(TrainingError, match=re.escape("--set train.cuda_graphs=false;")):
        machine.check(make_run())
    machine.wrong = ()
    machine.check(make_run())
    assert machine.num_tests == 2


def test_faults_of_ways_that_a_run_does_not_use_do_not_stop_it(machine, make_run):
    machine.wrong = (Way(), Way(recorded=False))
    machine.check(make_run(train={"compile": False}))
    assert machine.num_tests == 1


def test_nothing_runs_without_a_gpu_without_packs_or_if_it_is_switched_off(machine, make_run, monkeypatch):
    machine.check(make_run(batch={"mode": "separate"}))
    for value in ("off", "OFF", "0"):
        monkeypatch.setenv("LOOKONCE_SELFTEST", value)
        machine.check(make_run())
    monkeypatch.delenv("LOOKONCE_SELFTEST")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine.check(make_run())
    assert machine.num_tests == 0 and machine.notes == []


def test_a_way_that_could_not_be_computed_is_named_with_its_error():
    check = Check("model, bf16", float("inf"), 0, Way(), "RuntimeError: out of resources")
    assert "first of all model, bf16 (RuntimeError: out of resources); " in not_exact(Report(HERE, (check,), 1), Way())


class FakeContext:
    """Starts no process: calls the function at once."""

    def __init__(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code

    def __call__(self, method: str) -> FakeContext:
        return self

    def Pipe(self, duplex: bool):  # noqa: N802
        from multiprocessing import Pipe

        return Pipe(duplex)

    def Process(self, target, args, daemon):  # noqa: N802
        return FakeProcess(target, args, self.exit_code)


class FakeProcess:
    def __init__(self, target, args, exit_code: int) -> None:
        self.target, self.args, self.exitcode = target, args, exit_code

    def start(self) -> None:
        if self.exitcode == 0:
            self.target(*self.args)

    def kill(self) -> None: ...

    def join(self) -> None: ...


def test_the_report_comes_from_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(workflow, "get_context", FakeContext())
    expected = Report(HERE, (), 1)
    assert in_own_process(lambda: expected) == expected


def test_an_error_of_that_process_is_an_error_here(monkeypatch):
    def full() -> Report:
        raise TrainingError("the self-test is out of memory")

    monkeypatch.setattr(workflow, "get_context", FakeContext())
    with pytest.raises(TrainingError, match="^the self-test is out of memory$"):
        in_own_process(full)


def test_a_process_that_crashes_is_an_error_that_names_its_exit_code(monkeypatch):
    monkeypatch.setattr(workflow, "get_context", FakeContext(-11))
    with pytest.raises(TrainingError, match="ended with exit code -11 .* lookonce selftest; LOOKONCE_SELFTEST=off"):
        in_own_process(os.abort)
