"""Reading `log.jsonl`."""

from __future__ import annotations

import json

import pytest

from lookonce.run.log_file import Curves, read_curves, smoothed


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_losses_and_learning_rate_are_curves_by_step(tmp_path):
    log = tmp_path / "log.jsonl"
    write(
        log,
        {"step": 1, "loss": 3.0, "learning_rate": 1e-4},
        {"step": 2, "loss": 2.0, "learning_rate": 2e-4},
        {"step": 2, "eval_loss": 2.5},
        {"step": 2, "eval_exact_match": 0.5},
    )
    assert read_curves(log) == Curves({1: 3.0, 2: 2.0}, {2: 2.5}, {1: 1e-4, 2: 2e-4}, {2: 0.5})


def test_half_a_line_and_a_loss_that_is_no_number_are_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    write(log, {"step": 1, "loss": 3.0}, {"step": 2, "loss": None})
    log.write_text(log.read_text() + '{"step": 3, "lo')
    assert read_curves(log).loss == {1: 3.0}


def test_the_best_validation_loss_is_the_lowest_with_its_step(tmp_path):
    log = tmp_path / "log.jsonl"
    write(log, *({"step": step, "eval_loss": loss} for step, loss in [(10, 2.0), (20, 1.5), (30, 1.75)]))
    assert read_curves(log).best == (20, 1.5)


def test_few_points_are_not_smoothed_and_many_lose_their_noise():
    few = {step: float(step % 2) for step in range(20)}
    assert smoothed(few) == few
    many = {step: 1.0 + step % 2 for step in range(1000)}
    middle = [value for step, value in smoothed(many).items() if 50 < step]
    assert all(value == pytest.approx(1.5, abs=0.06) for value in middle)


def test_the_first_losses_do_not_flatten_the_rest():
    loss = {step: 9.0 if step < 20 else 1.0 + step / 10000 for step in range(1, 1001)}
    low, high = Curves(loss, {500: 1.5}).loss_range()
    assert (low, high) == (pytest.approx(1.006, abs=0.01), 1.5)


def test_a_constant_loss_and_no_loss_have_a_range():
    for curves in (Curves({1: 2.0, 2: 2.0}), Curves()):
        low, high = curves.loss_range()
        assert low < high
