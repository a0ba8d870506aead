"""The line of a logging step, the note when features are read too slowly, and `progress.json`."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import wait_until

from lookonce.datasets.records import Record, Turn
from lookonce.errors import Stopped, TrainingError
from lookonce.files import write_json
from lookonce.run.log_file import DrawnAnswer, DrawnQuestion, Progress, read_drawn, read_progress
from lookonce.train.data.policy import Drawn
from lookonce.train.loop.log_files import Heartbeat, MetricsLog, drop_lines_after, step_line, write_drawn


def started(folder, step=0) -> tuple[MetricsLog, SimpleNamespace, SimpleNamespace]:
    """The log of a training that starts after a step, its state, and what it measures."""
    lines, trainer = MetricsLog(folder / "log.jsonl", 10), SimpleNamespace(wait_seconds=0.0, bytes_read=0, num_tokens=0)
    lines.trainer = trainer
    state = SimpleNamespace(global_step=step, max_steps=100, epoch=0.5, is_world_process_zero=True)
    lines.on_train_begin(None, state, None)
    return lines, state, trainer


def logged(folder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function that makes a step of some seconds, partly spent waiting, and returns the last line of the log."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("lookonce.train.loop.log_files.time.perf_counter", lambda: clock.now)
    lines, state, trainer = started(tmp_path)

    def step(seconds: float, waited: float, read: int = 0, num_tokens: int = 0) -> dict[str, float]:
        lines.on_step_begin(None, state, None)
        clock.now += seconds
        trainer.wait_seconds += waited
        trainer.bytes_read += read
        trainer.num_tokens += num_tokens
        state.global_step += 1
        lines.on_step_end(None, state, None)
        step.logs = {"loss": 1.0}
        lines.on_log(None, state, None, step.logs)
        return logged(tmp_path)[-1]

    step.lines = lines
    return step


def test_waiting_is_part_of_the_step_time(run):
    line = run(seconds=2.0, waited=0.5, read=10**9)
    assert (line["samples_per_second"], line["wait_share"], line["read_mb_per_second"]) == (5.0, 0.25, 500.0)
    line = run(seconds=1.0, waited=0.0)
    assert (line["samples_per_second"], line["wait_share"], line["eta_seconds"]) == (10.0, 0.0, 98.0)
    assert run.lines.wait_share == pytest.approx(0.5 / 3)


def test_slow_reading_is_reported_once_with_numbers(run, capsys):
    run(seconds=2.0, waited=1.0)  # no batch is ready before the first step
    run(seconds=2.0, waited=0.05)
    run(seconds=0.5, waited=0.25)  # too short to tell
    assert "waits" not in capsys.readouterr().err
    run(seconds=2.0, waited=0.5, read=10**9)
    assert "training waits 25% of its time for features, which are read at 500 MB/s" in capsys.readouterr().err
    run(seconds=2.0, waited=0.5, read=10**9)
    assert "training waits" not in capsys.readouterr().err


def test_a_step_is_one_line_and_one_json_object(tmp_path, capsys):
    lines, state, _ = started(tmp_path)
    lines.on_step_begin(None, state, None)
    lines.on_step_end(None, state, None)
    state.global_step = 25
    lines.on_log(None, state, None, {"loss": 1.5, "grad_norm": 0.25, "learning_rate": 1e-4})
    lines.on_log(None, state, None, {"eval_loss": 2.5})
    answered = {"eval_exact_match": 0.5, "eval_num_questions": 8, "eval_seconds": 2.5}
    lines.on_log(None, state, None, answered | {"epoch": 1.0})
    lines.on_log(None, state, None, {"train_runtime": 3.0})
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("step  25/100  loss 1.5000  grad 0.25  lr 1.0e-04  ") and "samples/s" in first
    assert second == "step  25/100  validation loss 2.5000"
    assert third == "step  25/100  exact match 50.0% on 8 questions in 2.5 s"
    entries = logged(tmp_path)
    assert [entry["step"] for entry in entries] == [25, 25, 25] and entries[0]["loss"] == 1.5
    assert answered.items() <= entries[2].items()


@pytest.fixture
def resumed(tmp_path):
    """A training that resumes from step 4, with a log up to step 6 and half a line of a killed training."""
    written = "".join(json.dumps({"step": step}) + "\n" for step in (2, 4, 6))
    (tmp_path / "log.jsonl").write_text(written + '{"step": 3, "lo')
    return started(tmp_path, 4)[:2]


def test_steps_that_are_repeated_are_logged_once(resumed, tmp_path):
    assert [line["step"] for line in logged(tmp_path)] == [2, 4]
    assert resumed[0].first_step == 4


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_training(resumed, loss):
    lines, state = resumed
    with pytest.raises(TrainingError, match="at step 4, so training diverged; lower train.learning_rate"):
        lines.on_log(None, state, None, {"loss": loss})


def test_a_gradient_that_is_not_finite_is_null_in_the_log(resumed, tmp_path):
    lines, state = resumed
    lines.on_log(None, state, None, {"loss": 1.0, "grad_norm": float("inf")})
    assert logged(tmp_path)[-1]["grad_norm"] is None


def test_a_step_line_shows_rate_waiting_and_time_to_go():
    measured = {"samples_per_second": 123.4, "tokens_per_second": 45678.9, "wait_share": 0.021, "eta_seconds": 75.0}
    logs = {"loss": 0.5, "learning_rate": 2e-4}
    expected = "loss 0.5000  lr 2.0e-04  123 samples/s  45,679 tokens/s  data wait 2.1%  eta 01:15"
    assert step_line(logs, measured) == expected
    assert "tokens/s  17.3 GB reserved  data wait" in step_line(logs, measured | {"memory_gb": 17.26})


def test_the_line_of_a_training_by_rewards_has_its_answers_and_not_its_loss():
    measured = {"samples_per_second": 12.4, "tokens_per_second": 456.0, "wait_share": 0.021, "eta_seconds": 75.0}
    logs = {"loss": 0.01, "reward": 0.4219, "mixed_share": 0.31, "entropy": 0.684, "answer_tokens": 2.1, "cut_share": 0}
    logs |= {"sampling_seconds": 6.2, "rewarding_seconds": 0.8, "training_seconds": 3.0, "learning_rate": 2e-4}
    line = "reward 0.422  mixed 31%  entropy 0.68  length 2.1  sampling 62%  lr 2.0e-04  12 questions/s  eta 01:15"
    assert step_line(logs, measured) == line
    with_more = step_line(logs | {"kl": 0.01234, "cut_share": 0.125}, measured)
    assert "length 2.1  cut 12%  kl 0.0123  sampling" in with_more
    del logs["reward"]
    assert step_line(logs, measured).startswith("no new answers  sampling 62%  lr")


def test_drawn_answers_are_read_as_they_were_whatever_characters_they_have(tmp_path):
    path, text = (
        tmp_path / "drawn.jsonl",
        "".join(map(chr, [*range(0x21), 0x7F, 0x85, 0x2028, 0x2029, 0x202E, 0x1F600])),
    )
    question = Record((Path("a.jpg"),), (Turn("before", "x"), Turn(text, "yes")), origin="r:1"), 1
    for step in (2, 4, 6):
        write_drawn(path, [question], step, [(0, [Drawn([1], 0.5, text=text), Drawn([2], -1.0, is_cut=True)])])
    asked = DrawnQuestion(
        2, "r:1", ["a.jpg"], text, ["yes"], [DrawnAnswer(text, 0.5, False), DrawnAnswer("", -1, True)]
    )
    assert read_drawn(path) == [replace(asked, step=step) for step in (2, 4, 6)]
    with path.open("a") as file:
        file.write('{"step": NaN}\n[]\n{"step": 3, "ques')
    assert len(read_drawn(path)) == 3 and read_drawn(tmp_path / "none") == []
    drop_lines_after(path, 4)
    assert [line.step for line in read_drawn(path)] == [2, 4] and len(path.read_bytes().splitlines()) == 2


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 17_254_000_000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_line_has_tokens_and_the_time_but_no_memory_on_a_cpu(run):
    before = time.time()
    line = run(seconds=2.0, waited=0.5, num_tokens=3000)
    assert line["tokens_per_second"] == 1500 and before - 1 <= line["time"] <= time.time() + 1
    assert run(seconds=1.0, waited=0.0, num_tokens=500)["tokens_per_second"] == 500
    assert "memory_gb" not in line


def test_trackers_get_rates_and_memory_too(run, gpu):
    run(seconds=2.0, waited=0.5, num_tokens=3000)
    assert run.logs == {
        "loss": 1.0,
        "samples_per_second": 5.0,
        "tokens_per_second": 1500.0,
        "wait_share": 0.25,
        "memory_gb": 17.254,
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "progress.json"


def make_steps(heartbeat: Heartbeat, number: int, first: int = 0, of: int = 100, seconds: float = 0.0) -> None:
    state = SimpleNamespace(global_step=first, max_steps=of)
    heartbeat.on_train_begin(None, state, None)
    for _ in range(number):
        heartbeat.on_step_begin(None, state, None)
        time.sleep(seconds)
        state.global_step += 1
        heartbeat.on_step_end(None, state, None)
        heartbeat.on_log(None, state, None, {"loss": 1.5})


def wait_for(path, is_so) -> Progress:
    wait_until(lambda: (found := read_progress(path)) and is_so(found), timeout_s=5)
    return read_progress(path)


def test_progress_and_rate_are_written_while_training_runs(path):
    """A new phase is written at once."""
    with Heartbeat(path, samples_per_step=4, beat_s=0.02) as heartbeat:
        assert wait_for(path, lambda found: found.phase == "loading").num_steps == 0
        make_steps(heartbeat, 3, first=10, seconds=0.02)
        found = wait_for(path, lambda found: found.step == 13 and found.ms_per_sample)
        assert (found.first_step, found.num_steps, found.loss, found.end) == (10, 100, 1.5, "")
        assert found.ms_per_sample >= 5 and found.eta_s == pytest.approx(87 * 4e-3 * found.ms_per_sample, abs=0.1)
        heartbeat.enter("evaluating")
        assert read_progress(path).phase == "evaluating"
    assert read_progress(path).end == "finished"


@pytest.fixture
def hanging(monkeypatch) -> SimpleNamespace:
    """A disk on which the first beat hangs until it is released; records what was written, in order."""
    hang = SimpleNamespace(began=threading.Event(), release=threading.Event(), phases=[], timed_out=False)

    def write(path, value):
        if threading.current_thread().name == "heartbeat" and not hang.began.is_set():
            hang.began.set()
            hang.timed_out = not hang.release.wait(5)
        write_json(path, value)
        hang.phases.append(value["phase"])

    monkeypatch.setattr("lookonce.train.loop.log_files.write_json", write)
    return hang


def test_a_new_phase_is_not_undone_by_a_beat_that_began_before_it(path, hanging):
    with Heartbeat(path, 4, beat_s=0.01) as heartbeat:
        assert hanging.began.wait(5)
        releasing = threading.Timer(0.1, hanging.release.set)
        releasing.start()
        heartbeat.enter("evaluating")
        releasing.join()
    assert hanging.phases == sorted(hanging.phases, key=["loading", "evaluating"].index)
    assert {"loading", "evaluating"} == set(hanging.phases)


def test_a_step_does_not_wait_for_the_disk(path, hanging):
    with Heartbeat(path, 4, beat_s=0.01) as heartbeat:
        assert hanging.began.wait(5)
        state = SimpleNamespace(global_step=1, max_steps=2)
        heartbeat.on_step_begin(None, state, None)
        heartbeat.on_step_end(None, state, None)
        hanging.release.set()
    assert not hanging.timed_out


@pytest.mark.parametrize(
    ("error", "end", "reason"),
    [
        (Stopped("stopped by SIGUSR1 after step 3;\nmore"), "stopped", "stopped by SIGUSR1 after step 3;"),
        (KeyboardInterrupt(), "stopped", "interrupted by Ctrl-C"),
        (RuntimeError("no memory"), "failed", "no memory"),
    ],
    ids=["stopped", "interrupted", "failed"],
)
def test_the_end_is_written_with_the_last_step(path, error, end, reason):
    with pytest.raises(type(error)), Heartbeat(path, 4) as heartbeat:
        make_steps(heartbeat, 3)
        raise error
    found = read_progress(path)
    assert (found.end, found.reason, found.step, found.eta_s) == (end, reason, 3, None)


def test_a_full_disk_does_not_stop_a_training_and_a_loss_that_is_no_number_is_left_out(path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, Heartbeat(path, 4, beat_s=0.01) as heartbeat:
        patch.setattr("lookonce.train.loop.log_files.write_json", fail)
        make_steps(heartbeat, 3, seconds=0.02)
        patch.undo()
        heartbeat.on_log(None, None, None, {"loss": float("nan"), "grad_norm": 1.0})
    assert read_progress(path).loss is None


def test_only_the_first_rank_writes(path):
    with Heartbeat(path, 4, is_first=False, beat_s=0.01) as heartbeat:
        make_steps(heartbeat, 3, seconds=0.02)
    assert not path.exists()
