"""What a training does before its first step is named, with its seconds; and the curves of `log.jsonl`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.rows import write_lines

from lookonce.run.log_file import Curves, read_curves, smoothed
from lookonce.run.startup import OTHER, Startup, process_age


def test_each_piece_of_work_is_said_with_its_seconds():
    notes: list[str] = []
    startup = Startup(notes.append)
    for name in ("read records", "load weights"):
        with startup.timed(name):
            assert name not in "".join(notes)
    assert notes == ["read records: 0.0 s", "load weights: 0.0 s"]
    with pytest.raises(ValueError), startup.timed("work that fails"):
        raise ValueError
    assert len(notes) == 2 and list(startup.seconds) == ["read records", "load weights"]
    startup.seconds["load libraries"] = 4.0  # before this could be timed
    with startup.timed("load libraries"):
        pass
    assert notes[-1] == "load libraries: 4.0 s"  # as in the line that adds up


def test_slow_work_is_said_before_it_ends(monkeypatch):
    monkeypatch.setattr("lookonce.run.startup.PATIENCE_S", 0.02)
    notes: list[str] = []
    startup = Startup(notes.append)
    with startup.timed("read records"):
        deadline = time.monotonic() + 5
        while not notes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert notes == ["read records ..."]
    assert len(notes) == 2 and startup.seconds["read records"] >= 0.02


@pytest.mark.guarantee("The start's summary accounts for all seconds before the first step.")
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


def test_losses_and_learning_rate_are_curves_by_step(tmp_path):
    log = write_lines(
        tmp_path / "log.jsonl",
        *({"step": step, "loss": 4.0 - step, "learning_rate": step * 1e-4} for step in (1, 2)),
        *({"step": 2, "eval_loss": 2.5}, {"step": 2, "eval_exact_match": 0.5}),
    )
    assert read_curves(log) == Curves({1: 3.0, 2: 2.0}, {2: 2.5}, {1: 1e-4, 2: 2e-4}, {2: 0.5})


def test_half_a_line_and_a_loss_that_is_no_number_are_left_out_and_the_best_is_the_lowest(tmp_path):
    first = {"step": 1, "loss": 3.0, "grad_norm": None}  # infinite in fp16
    log = write_lines(tmp_path / "log.jsonl", first, {"step": 2, "loss": None})
    log.write_text(log.read_text() + '{"step": 3, "lo')
    assert read_curves(log).loss == {1: 3.0}
    rows = ({"step": step, "eval_loss": loss} for step, loss in [(10, 2.0), (20, 1.5), (30, 1.75)])
    assert read_curves(write_lines(tmp_path / "log.jsonl", *rows)).best == (20, 1.5)


def test_few_points_are_not_smoothed_and_many_lose_their_noise():
    few = {step: float(step % 2) for step in range(20)}
    assert smoothed(few) == few
    many = {step: 1.0 + step % 2 for step in range(1000)}
    middle = [value for step, value in smoothed(many).items() if 50 < step]
    assert all(value == pytest.approx(1.5, abs=0.06) for value in middle)


def test_the_first_losses_do_not_flatten_the_rest_and_a_constant_loss_and_no_loss_have_a_range():
    loss = {step: 9.0 if step < 20 else 1.0 + step / 10000 for step in range(1, 1001)}
    low, high = Curves(loss, {500: 1.5}).loss_range()
    assert (low, high) == (pytest.approx(1.006, abs=0.01), 1.5)
    for curves in (Curves({1: 2.0, 2: 2.0}), Curves()):
        low, high = curves.loss_range()
        assert low < high
