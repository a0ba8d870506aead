"""What a person reads while and after a run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lookonce.errors import TrainingError
from lookonce.run.folder import RunFolder
from lookonce.status.summary import Summary, program
from lookonce.train.loop.metrics_log import StepLines, step_line

SUMMARY = Summary(
    run="runs/a",
    num_files=66,
    num_distinct=64,
    cache="caches/0123",
    cache_bytes=1_300_000,
    num_shards=1,
    encode_seconds=0.9,
    num_steps=10,
    first_step=0,
    num_samples=80,
    num_too_long=0,
    train_seconds=61.0,
    wait_share=0.028,
    split="val",
    num_questions=69,
    exact_match=0.884,
    majority=0.42,
    adapter="runs/a/adapter",
    next_command="lookonce eval runs/a",
)


def test_the_summary_has_a_line_for_each_thing_to_know():
    assert SUMMARY.text().strip().splitlines()[2:] == [
        "  images      66 files, 64 distinct",
        "  cache       1.3 MB in 1 shard, encoded once in 0.9 s",
        "              caches/0123",
        "  training    80 samples in 10 steps; 1 min 1 s, 2.8% of each step waiting for data",
        "  validation  88.4% exact match on 69 questions; always the majority answer: 42.0%",
        "  adapter     runs/a/adapter",
        "  try next    lookonce eval runs/a",
    ]


def test_what_was_not_measured_is_not_told():
    text = replace(SUMMARY, exact_match=None, majority=None).text()
    assert "exact match" not in text


def test_records_left_out_are_told():
    assert "3 records left out as too long" in replace(SUMMARY, num_too_long=3).text()


def test_a_resumed_training_says_what_its_time_is_of():
    assert "10 steps; 1 min 1 s since it was resumed at step 4" in replace(SUMMARY, first_step=4).text()


def test_a_summary_is_read_as_it_was_written(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY.to_json()))
    assert Summary.read(RunFolder(tmp_path)) == SUMMARY


@pytest.mark.parametrize(
    ("called", "on_path", "expected"),
    [
        ("bin/lookonce", False, "bin/lookonce"),
        ("bin/lookonce", True, "lookonce"),
        ("somewhere/pytest", False, "lookonce"),
    ],
)
def test_the_next_command_can_be_typed_as_it_is(tmp_path, monkeypatch, called, on_path, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lookonce").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if on_path else "")
    monkeypatch.setattr("sys.argv", [called])
    assert program() == expected


def test_a_step_is_one_line_and_one_json_object(tmp_path, capsys):
    lines = StepLines(tmp_path / "log.jsonl", samples_per_step=8)
    lines.attach(SimpleNamespace(wait_seconds=0.0, bytes_read=0))
    state = SimpleNamespace(global_step=0, max_steps=100, epoch=0.0, is_world_process_zero=True)
    lines.on_train_begin(None, state, None)
    lines.on_step_begin(None, state, None)
    lines.on_step_end(None, state, None)
    state.global_step = 25
    lines.on_log(None, state, None, {"loss": 1.5, "grad_norm": 0.25, "learning_rate": 1e-4})
    lines.on_log(None, state, None, {"eval_loss": 2.5})
    lines.on_log(None, state, None, {"train_runtime": 3.0})
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("step  25/100  loss 1.5000  grad 0.25  lr 1.0e-04  ") and "samples/s" in first
    assert second == "step  25/100  validation loss 2.5000"
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged] == [25, 25] and logged[0]["loss"] == 1.5


@pytest.fixture
def resumed(tmp_path):
    """A training that goes on from step 4 where the log has gone on to step 6."""
    lines = StepLines(tmp_path / "log.jsonl", samples_per_step=8)
    lines.attach(SimpleNamespace(wait_seconds=0.0, bytes_read=0))
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (2, 4, 6)))
    state = SimpleNamespace(global_step=4, max_steps=100, epoch=0.0, is_world_process_zero=True)
    lines.on_train_begin(None, state, None)
    return lines, state


def test_steps_that_are_made_again_are_logged_once(resumed, tmp_path):
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [2, 4]
    assert resumed[0].first_step == 4


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_training(resumed, loss):
    lines, state = resumed
    with pytest.raises(TrainingError, match="at step 4, so nothing more can be learned; lower train.learning_rate"):
        lines.on_log(None, state, None, {"loss": loss})


def test_a_gradient_that_is_no_number_is_null_in_the_log(resumed, tmp_path):
    lines, state = resumed
    lines.on_log(None, state, None, {"loss": 1.0, "grad_norm": float("inf")})
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["grad_norm"] is None


def test_validation_and_checkpoints_do_not_count_as_time_of_steps(resumed):
    lines, state = resumed
    lines.on_step_begin(None, state, None)
    lines.on_step_end(None, state, None)
    time.sleep(0.2)
    assert lines.busy_seconds < 0.1 and lines.wait_share == 0


def test_a_step_line_shows_rate_waiting_and_time_to_go():
    measured = {"samples_per_second": 123.4, "wait_share": 0.021, "eta_seconds": 75.0}
    line = step_line({"loss": 0.5, "learning_rate": 2e-4}, measured)
    assert line == "loss 0.5000  lr 2.0e-04  123 samples/s  data wait 2.1%  eta 01:15"
