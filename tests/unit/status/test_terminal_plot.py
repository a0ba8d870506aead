"""The losses as block characters."""

from __future__ import annotations

import pytest

from lookonce.run.log_file import Curves
from lookonce.status.terminal_plot import HEIGHT, MARK, columns, loss_plot

FALLING = {step: 3.0 - 2 * step / 100 for step in range(1, 101)}


def test_a_plot_has_the_losses_the_best_and_the_last_step():
    plot = loss_plot(Curves(FALLING, {50: 2.5, 100: 2.25}))
    title, *lines, axis, numbers = plot.splitlines()
    assert "validation loss, lowest 2.2500 at step 100" in title
    assert len(lines) == HEIGHT and numbers.split() == ["0", "step", "100"] and set(axis.strip()) == set("└─")
    assert plot.count(MARK) == 3  # one is in the title
    bars = [line.partition("│")[2] for line in lines]
    lengths = [len(bar.rstrip(MARK).rstrip()) for bar in bars]
    assert lengths == sorted(lengths) and lengths[-1] == 70


def test_exact_match_is_a_line_of_blocks_below_the_losses():
    plain, plot = (loss_plot(Curves(FALLING, exact_match=some)) for some in ({}, {50: 0.0, 100: 1.0}))
    *losses, title, line = plot.splitlines()
    assert losses == plain.splitlines() and title.strip() == "exact match, highest 100.0% at step 100"
    blocks = line.partition("│")[2]
    assert (len(blocks), blocks[0], blocks[-1]) == (70, "▁", "█") and sorted(blocks) == list(blocks)


@pytest.mark.parametrize("width", [30, 60, 80])
def test_no_line_is_wider_than_the_terminal(width):
    plot = loss_plot(Curves(FALLING), width)
    assert max(map(len, plot.splitlines())) <= width


@pytest.mark.parametrize("curves", [Curves(), Curves({1: 2.0})])
def test_without_two_points_there_is_no_plot(curves):
    assert loss_plot(curves) == ""


def test_a_terminal_that_is_too_narrow_gets_no_plot():
    assert loss_plot(Curves(FALLING), 20) == ""


def test_a_column_is_the_mean_of_its_points_or_between_its_neighbours():
    assert columns({1: 1.0, 2: 3.0, 3: 5.0, 4: 7.0}, last=4, number=2) == [2.0, 6.0]
    assert columns({1: 1.0, 4: 4.0}, last=4, number=4) == [1.0, 2.0, 3.0, 4.0]
    assert columns({2: 1.0}, last=4, number=4) == [1.0] * 4


def test_a_constant_loss_is_a_line():
    assert "▇" * 70 in loss_plot(Curves({step: 1.0 for step in range(1, 10)})).splitlines()[-3]
