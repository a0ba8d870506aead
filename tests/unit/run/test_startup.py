"""What a training does before its first step is said, with its seconds."""

from __future__ import annotations

import time

import pytest

from lookonce.run.startup import Startup


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


def test_work_that_is_done_twice_has_the_sum():
    startup = Startup(lambda note: None)
    for _ in range(2):
        with startup.timed("make tokens"):
            time.sleep(0.01)
    assert startup.seconds["make tokens"] >= 0.02


def test_work_that_fails_is_not_counted():
    notes: list[str] = []
    startup = Startup(notes.append)
    with pytest.raises(ValueError), startup.timed("read records"):
        raise ValueError
    assert notes == [] and startup.seconds == {}
