"""Which job is started first, and when all have ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.study.pool import Job, by_urgency, schedule


def job(name: str, cost: float, *after: str) -> Job:
    return Job(name, (), Path("log"), cost, after)


def costs(jobs: list[Job]) -> dict[str, float]:
    return {one.name: one.cost for one in jobs}


def test_the_job_with_the_longest_chain_behind_it_goes_first():
    jobs = [job("long", 5), job("first", 2), job("second", 2, "first"), job("third", 2, "second"), job("short", 1)]
    assert [one.name for one in by_urgency(jobs)] == ["first", "long", "second", "third", "short"]
    times = schedule(jobs, costs(jobs), 2)
    assert list(times) == ["first", "long", "second", "third", "short"]
    assert (times["second"], times["third"], times["short"]) == ((2, 4), (4, 6), (5, 6))


def test_one_after_another_takes_the_sum():
    jobs = [job("a", 1), job("b", 2), job("c", 3, "a")]
    assert max(end for _, end in schedule(jobs, costs(jobs), 1).values()) == 6


@st.composite
def jobs(draw) -> list[Job]:
    """Each job waits for none, or for one before it."""
    number = draw(st.integers(0, 11))
    befores = [None, *(draw(st.none() | st.integers(0, before)) for before in range(number))]
    return [
        job(str(number), draw(st.integers(1, 9)), *(() if before is None else (str(before),)))
        for number, before in enumerate(befores)
    ]


@pytest.mark.guarantee("No GPU of a study is idle while a job could run.")
@settings(max_examples=50, deadline=None)
@given(jobs(), st.integers(1, 4))
def test_no_place_is_idle_while_a_job_could_run(jobs, num_slots):
    """At any time either all places are taken, or every job that has not begun waits for one that has not ended."""
    times = schedule(jobs, costs(jobs), num_slots)
    assert times.keys() == {one.name for one in jobs}
    for moment, _ in times.values():
        running = [one for one in jobs if times[one.name][0] <= moment < times[one.name][1]]
        assert len(running) <= num_slots
        waiting = [one for one in jobs if times[one.name][0] > moment]
        can_run = [one for one in waiting if all(times[name][1] <= moment for name in one.after)]
        assert len(running) == num_slots or not can_run
    assert all(times[name][1] <= times[one.name][0] for one in jobs for name in one.after)
