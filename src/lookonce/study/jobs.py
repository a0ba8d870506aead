"""The jobs of a study: processes, what each waits for, and which of them is started first.

Design: of the jobs that can start, the one with the longest chain behind it goes first, since chains bound the time of
all (list scheduling by critical path). The same rule makes the plan's estimate and runs the study.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A process that a study starts."""

    name: str
    command: tuple[str, ...]
    """Arguments of lookonce; the last one is the run file."""
    log: Path
    cost: float = 0
    """How much work it is, in any unit: the samples that are trained on."""
    after: tuple[str, ...] = ()
    """The jobs that must have succeeded before."""
    is_done: Callable[[], bool] = lambda: False
    """Whether there is nothing left to do; asked right before it would be started."""
    used_by: Callable[[], str] = lambda: ""
    """The process that works on the same; empty if none does. The job waits for it."""


def by_urgency(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, those with the longest chain of jobs that wait for them first; equal ones stay in order."""
    costs = {job.name: job.cost for job in jobs}
    followers = {name: [job.name for job in jobs if name in job.after] for name in costs}

    def chain(name: str) -> float:
        return costs[name] + max(map(chain, followers[name]), default=0.0)

    return sorted(jobs, key=lambda job: -chain(job.name))


def can_start(job: Job, done: Collection[str]) -> bool:
    """Whether all that a job waits for is done."""
    return all(name in done for name in job.after)


def schedule(jobs: Sequence[Job], seconds: Mapping[str, float], num_slots: int) -> Mapping[str, tuple[float, float]]:
    """When each job begins and ends if this many run at the same time, in the order in which they begin.

    `seconds` says how long each job takes, by name.
    """
    waiting, times = by_urgency(jobs), dict[str, tuple[float, float]]()
    running: list[tuple[float, str]] = []
    now, done = 0.0, set[str]()
    while waiting or running:
        ready = [job for job in waiting if can_start(job, done)]
        for job in ready[: num_slots - len(running)]:
            waiting.remove(job)
            times[job.name] = (now, now + seconds[job.name])
            heapq.heappush(running, (now + seconds[job.name], job.name))
        now, name = heapq.heappop(running)
        done.add(name)
    return times
