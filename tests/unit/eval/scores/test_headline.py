"""Baselines beside the headline: what they score, and the paired difference with its interval."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lookonce.datasets.records import Turn
from lookonce.eval.scores.metrics import BASELINES, IN_CONTEXT, NAMES, Evaluation, Headline
from lookonce.eval.scores.prediction import Prediction

NUM_QUESTIONS = 40
PLAIN = Prediction("val.jsonl:1", ("a.jpg",), "q", "yes", "yes", "no")
ROWS = [
    replace(PLAIN, predicted="yes" if number % 4 else "no", image_keys=(str(number),))
    for number in range(NUM_QUESTIONS)
]
"""Questions about an image each, of which three quarters are answered right, and none by the majority."""


def test_a_baseline_is_compared_question_by_question():
    half = ["yes" if number % 4 > 1 else "no" for number in range(NUM_QUESTIONS)]
    headline = Headline.of(ROWS, {"untuned": half, "blank": [row.predicted for row in ROWS]})
    majority = headline.baselines["majority"]
    assert (majority.exact_match, majority.difference) == (0.0, 0.75)
    assert headline.interval == (pytest.approx(0.6, abs=0.02), pytest.approx(0.86, abs=0.02))
    assert majority.interval == (pytest.approx(0.57, abs=0.02), pytest.approx(0.86, abs=0.02))
    untuned = headline.baselines["untuned"]
    assert (untuned.exact_match, untuned.difference) == (0.5, 0.25)
    assert 0.1 < untuned.interval.low < 0.25 < untuned.interval.high < 0.41  # 0.05 to 0.45 if not in pairs
    blank = headline.baselines["blank"]
    assert (blank.exact_match, blank.difference) == (0.75, 0.0)
    assert 0 < blank.interval.high < 0.1  # the same answers are no certainty


def test_in_conversations_the_majority_given_the_context_counts_and_in_first_turns_the_majority():
    later = [replace(row, turn=1, earlier=(Turn("p", "no"),), majority_in_context="yes") for row in ROWS[:10]]
    assert "majority_in_context" not in Headline.of(ROWS, {}).baselines
    found = Headline.of([*ROWS[:10], *later], {}).baselines
    assert (found["majority"].exact_match, found["majority_in_context"].exact_match) == (0.0, 0.5)


def test_of_one_image_there_is_no_interval():
    headline = Headline.of([replace(row, image_keys=("a",)) for row in ROWS], {})
    assert headline.interval is None
    assert headline.baselines["majority"].line("majority") == ("majority", "0.0%", "+75.0", "none")


def test_the_table_of_all_baselines_fits_80_columns():
    row = replace(ROWS[0], turn=1, earlier=(Turn("p", "no"),), majority_in_context="yes")
    answers = {name: ["yes"] * NUM_QUESTIONS for name in (*BASELINES, *IN_CONTEXT)}
    block = Evaluation.of([row, *ROWS[1:]], baselines=answers).text().split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in block[1:]] == list(NAMES.values())
    assert max(map(len, block)) <= 80
    assert block[-1].split()[:4] == ["no", "context", "100.0%", "-25.0"]
