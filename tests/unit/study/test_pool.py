"""The pool: what is started, what is skipped and why, and how it stops."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from lookonce.errors import Stopped
from lookonce.study import pool
from lookonce.study.pool import Job, Pool, Slot, by_urgency, slots


class Process:
    """Does a command at the second look with the exit code that the command names, or with that of a signal.

    It takes another one if it has succeeded and is not closed.
    """

    started: list[str] = []
    all: list[Process] = []

    def __init__(self, environment, log):
        self.job, self.code, self.is_closed = None, None, False
        log.touch()
        Process.all.append(self)

    def begin(self, job):
        if self.code or self.is_closed:
            return False
        self.job, self.looks, self.code = job, 0, None
        Process.started.append(job.name)
        return True

    def poll(self):
        self.looks += 1
        if self.code is None and self.looks > 1 and self.job.command[1] != "waits":
            self.code = int(self.job.command[1])
        return self.code

    def send_signal(self, number):
        self.code = 75

    def close(self):
        self.is_closed = True

    def wait(self):
        assert self.is_closed, "it would wait for another command"


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(pool, "Runner", Process)
    monkeypatch.setattr(pool, "INTERVAL_S", 0)
    Process.started, Process.all = [], []


@pytest.fixture
def job(tmp_path):
    return lambda name, code="0", cost=1, after=(): Job(name, (name, code), tmp_path / "log", cost, after)


def run(jobs, num_slots=1, notes=None):
    return Pool([Slot() for _ in range(num_slots)], (notes if notes is not None else []).append, lambda name: "").run(
        jobs
    )


@pytest.mark.guarantee("A study names the runs that fail, and finishes all others.")
def test_what_waits_for_a_failed_job_is_skipped_and_the_rest_finishes(job):
    jobs = [job("a", "1"), job("b", after=("a",)), job("c", after=("b",)), job("d"), job("e", "-9")]
    advice = f"; write another one: lookonce init {'folder/' * 20}a.yaml"
    jobs[0].log.write_text(f"Error: before\nstep 1\nError: a.yaml is wrong:\n  b: unknown key{advice}\n")
    outcome = run(jobs, 2)
    assert outcome.done == ["d"] and outcome.skipped == {"b": "a failed", "c": "b is skipped"}
    assert outcome.failed["a"].startswith(f"a.yaml is wrong: b: unknown key{advice}, see ")
    assert outcome.failed["e"].startswith("killed by SIGKILL")
    assert outcome.exit_code == 1 and "b is skipped, because a failed" in outcome.text()


@pytest.mark.guarantee("A study names the runs that fail, and finishes all others.")
def test_a_job_without_a_log_fails_and_the_rest_finishes(job, tmp_path):
    """The disk is full, or somebody has removed the file."""
    (tmp_path / "file").touch()
    nowhere = replace(job("b", cost=8), log=tmp_path / "file" / "log")
    removed = replace(job("c", "1", cost=7), is_done=lambda: (tmp_path / "log").unlink())
    outcome = run([job("a", cost=9), nowhere, removed, job("d")])
    assert outcome.done == ["a", "d"] and outcome.failed.keys() == {"b", "c"}
    assert f"{tmp_path / 'file'}" in outcome.failed["b"] and outcome.failed["c"].startswith("exit code 1, see ")


def test_a_job_that_was_stopped_is_unfinished_and_so_is_what_waits_for_it(job):
    outcome = run([job("a", "75"), job("b", after=("a",)), job("c")])
    assert (outcome.stopped, outcome.done, outcome.exit_code) == (["a", "b"], ["c"], 75)
    Process.started = []  # and what is done already is not started
    outcome = run([replace(job("a"), is_done=lambda: True), job("b", after=("a",))])
    assert (outcome.done, Process.started) == (["a", "b"], ["b"])


def test_what_another_process_uses_is_no_failure(job, monkeypatch):
    """Two studies find a run free at the same time; the one that comes second waits, or finds it done."""
    monkeypatch.setattr(pool, "RETRY_S", 0)
    looks = [False, False, False, True]
    refused, follower = replace(job("a", "1", cost=9), is_done=lambda: looks.pop(0)), job("b", after=("a",))
    refused.log.write_text(
        "Error: runs/a is in use by `lookonce train`: process 1 on host 1; wait until it has ended\n"
    )
    notes = []
    outcome = run([refused, follower, job("c")], notes=notes)
    assert (outcome.failed, outcome.skipped, outcome.exit_code) == ({}, {}, 0)
    assert sorted(outcome.done) == ["a", "b", "c"] and Process.started[:1] == ["a"]
    assert ["in use by `lookonce train`" in note for note in notes if "this study waits" in note] == [True]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_more_is_started(job, number):
    def stop() -> bool:
        os.kill(os.getpid(), number)
        return False

    before = signal.signal(number, signal.SIG_DFL)  # what nohup starts ignores SIGHUP
    try:
        with pytest.raises(Stopped, match=f"{number.name}; run the same command again to continue"):
            run([job("a", "waits", cost=9), replace(job("b", "waits"), is_done=stop), job("c")], 2)
    finally:
        signal.signal(number, before)
    assert Process.started == ["a", "b"]


def test_a_process_takes_jobs_until_one_fails(job):
    run([job("a", cost=9), job("b", "1", cost=8), job("c", cost=7), job("d", after=("c",))], 1)
    assert len(Process.all) == 2 and Process.started == ["a", "b", "c", "d"]
    Process.all = []
    run([job("a"), job("b", after=("a",)), job("c", after=("b",))], 3)
    assert len(Process.all) == 1  # though two places were never used
    Process.all = []
    run([job("a", "1", cost=9), job("b"), job("c", after=("b",))], 2)
    assert [one.job.name for one in Process.all] == ["a", "c"]  # c in the process of b, which has not failed
    Process.all, idle = [], []
    last = replace(job("last", cost=1), is_done=lambda: idle.append(Process.all[1].is_closed))
    run([job("long", cost=9), job("short", cost=5), last], 2)
    assert idle == [False] and all(process.is_closed for process in Process.all)


def test_every_gpu_has_a_place_and_several_runs_can_share_one(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [one.environment for one in slots(["0", "2"], None)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "2"},
    ]
    assert [one.name for one in slots(["0", "2"], 3)] == ["GPU 0", "GPU 2", "GPU 0"]
    assert len(slots([], None)) == 1 and len({*slots([], 2)}) == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" in slots(["0"], None)[0].environment and slots([], 1)[0].environment == {}


def test_the_job_with_the_longest_sequence_behind_it_goes_first(job):
    jobs = [job("long", cost=5), job("first", cost=2), job("second", cost=2, after=("first",))]
    jobs += [job("third", cost=2, after=("second",)), job("short", cost=1)]
    assert [one.name for one in by_urgency(jobs)] == ["first", "long", "second", "third", "short"]


@pytest.mark.guarantee("No GPU of a study is idle while a job could run.")
@hypothesis.settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@hypothesis.given(st.data(), st.integers(1, 4))
def test_no_place_is_idle_while_a_job_could_run(job, monkeypatch, data, num_slots):
    """Whenever the pool waits, all places are taken, or every job that waits needs one that has not ended."""
    befores = [data.draw(st.none() | st.integers(0, number - 1)) if number else None for number in range(8)]
    jobs = [
        job(str(number), cost=data.draw(st.integers(1, 9)), after=() if before is None else (str(before),))
        for number, before in enumerate(befores)
    ]
    running = Pool([Slot() for _ in range(num_slots)], lambda note: None, lambda name: "")

    def look(seconds: float) -> None:
        ready = [one for one in running._waiting if {*one.after} <= {*running.outcome.done}]
        assert not (running._free and ready) and len(running._running) <= num_slots
        assert running._waiting or not any(slot.runner for slot in running._free)  # an idle process keeps memory

    monkeypatch.setattr(pool.time, "sleep", look)
    assert sorted(running.run(jobs).done) == sorted(one.name for one in jobs)
