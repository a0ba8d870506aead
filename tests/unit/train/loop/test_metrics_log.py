"""The line of a logging step, and what is said when features come too slowly."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lookonce.train.loop.metrics_log import StepLines


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Makes steps of so many seconds, of which so many are spent waiting; gives the lines of the log."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lookonce.train.loop.metrics_log.time.perf_counter", lambda: clock.now)
    trainer = SimpleNamespace(wait_seconds=0.0, bytes_read=0)
    lines = StepLines(tmp_path / "log.jsonl", 10)
    lines.attach(trainer)
    state = SimpleNamespace(global_step=0, max_steps=100, epoch=0.5, is_world_process_zero=True)
    lines.on_train_begin(None, state, None)

    def step(seconds: float, waited: float, read: int = 0) -> dict[str, float]:
        lines.on_step_begin(None, state, None)
        clock.now += seconds
        trainer.wait_seconds += waited
        trainer.bytes_read += read
        state.global_step += 1
        lines.on_step_end(None, state, None)
        lines.on_log(None, state, None, {"loss": 1.0})
        return json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])

    step.lines = lines
    return step


def test_waiting_is_a_part_of_the_time_of_steps(run):
    line = run(seconds=2.0, waited=0.5, read=10**9)
    assert (line["samples_per_second"], line["wait_share"], line["read_mb_per_second"]) == (5.0, 0.25, 500.0)
    line = run(seconds=1.0, waited=0.0)
    assert (line["samples_per_second"], line["wait_share"], line["eta_seconds"]) == (10.0, 0.0, 98.0)
    assert run.lines.wait_share == pytest.approx(0.5 / 3)


def test_that_reading_is_too_slow_is_told_once_with_numbers(run, capsys):
    run(seconds=2.0, waited=1.0)  # before the first step nothing is ready
    run(seconds=2.0, waited=0.05)
    assert "waits" not in capsys.readouterr().err
    run(seconds=2.0, waited=0.5, read=10**9)
    assert "training waits 25% of its time for features, which come at 500 MB/s" in capsys.readouterr().err
    run(seconds=2.0, waited=0.5, read=10**9)
    assert "training waits" not in capsys.readouterr().err
