"""What a training does before its first step is said, with its seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lookonce.run.startup import OTHER, Startup, process_age


def test_each_piece_of_work_is_said_with_its_seconds():
    notes: list[str] = []
    startup = Startup(notes.append)
    for name in ("read records", "load weights"):
        with startup.timed(name):
            assert name not in "".join(notes)
    assert notes == ["read records: 0.0 s", "load weights: 0.0 s"]
    assert list(startup.seconds) == ["read records", "load weights"]


def test_slow_work_is_said_before_it_ends():
    notes: list[str] = []
    startup = Startup(notes.append, patience_s=0.02)
    with startup.timed("read records"):
        deadline = time.monotonic() + 5
        while not notes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert notes == ["read records ..."]
    assert len(notes) == 2 and startup.seconds["read records"] >= 0.02


def test_work_that_fails_is_not_counted():
    notes: list[str] = []
    startup = Startup(notes.append)
    with pytest.raises(ValueError), startup.timed("read records"):
        raise ValueError
    assert notes == [] and startup.seconds == {}


@pytest.mark.guarantee("All seconds before the first step are accounted for.")
def test_the_line_at_the_first_step_adds_up_to_all_seconds_since_the_beginning():
    notes: list[str] = []
    startup = Startup(notes.append, age_s=30.0)
    with startup.timed("read records"):
        pass
    startup.seconds |= {"load weights": 2.0, "compile and warm up": 8.0, "hash model and records": 0.01}
    startup.end()
    assert notes[-1] == "first step after 30.0 s: other work 20.0 s, compile and warm up 8.0 s, load weights 2.0 s"
    assert sum(startup.seconds.values()) == pytest.approx(30, abs=0.05) and list(startup.seconds)[-1] == OTHER


def test_the_start_of_a_process_began_with_it(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that was set does not matter
    assert process_age() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME) - started_at(), abs=0.1)


def started_at() -> float:
    """Seconds from the machine's boot to this process's start, from Linux."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(stat[19]) / os.sysconf("SC_CLK_TCK")
