"""Scores of several samples of each question."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answers import questions

from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.decoding.sampling import Sampling
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.scores.samples import SampledQuestion, SampleScores, best_of, most_given

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=7)


def sampled_question(row: Prediction, samples: list[Answer]) -> SampledQuestion:
    return SampledQuestion(replace(row, predicted=most_given(samples).text), tuple(samples))


def answer(text: str, logprob: float = -1.0, *, cut: bool = False) -> Answer:
    return Answer(text, (1,), logprob, "length" if cut else "stop")


@given(REWARDS, st.data())
def test_the_best_of_some_samples_is_the_mean_over_all_choices_of_them(rewards, data):
    num = data.draw(st.integers(1, len(rewards)))
    expected = fmean(max(chosen) for chosen in combinations(rewards, num))
    assert best_of(np.array([rewards]), num)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [(["no", "yes", "yes "], 1), (["no", "yes", "yes", "no"], 0), (["e\u0301", "b", "\u00e9"], 0), (["b"], 0)],
)
def test_the_answer_of_most_is_compared_as_exact_match_does_and_the_first_of_equally_many_counts(texts, expected):
    samples = [answer(text) for text in texts]
    assert most_given(samples) is samples[expected]


def test_scores_of_samples():
    """Per image: one question always right, one never, and three of which 1, 2 and 3 of 4 samples are right."""
    rows = questions(6)
    sampled = []
    for number, row in enumerate(rows):
        num_right = (4, 0, 1, 2, 3)[number % 5]
        texts = [row.answer] * num_right + [f"wrong {n}" for n in range(4 - num_right)]
        samples = [answer(text, -1.0 - place, cut=place == 3) for place, text in enumerate(reversed(texts))]
        sampled.append(sampled_question(row, samples))
    scores = SampleScores.of(sampled, Sampling(4), seed=3)
    assert list(scores.best_of) == [1, 2, 4]
    assert [scores.best_of[num].value for num in (1, 2, 4)] == pytest.approx([10 / 20, (6 + 0 + 3 + 5 + 6) / 30, 4 / 5])
    assert scores.vote.value == pytest.approx(3 / 5), "two of four and two others are most; one of four are as many"
    assert scores.likeliest.value == pytest.approx(1 / 5) and scores.mixed.value == pytest.approx(3 / 5)
    assert (scores.all_right, scores.none_right, scores.cut) == (0.2, 0.2, 0.25)
    assert scores.distinct == pytest.approx((1 + 4 + 4 + 3 + 2) / 5)
    low, high = scores.mixed.interval
    assert low < scores.mixed.value < high
    assert scores.by_question["q2"].num_questions == 6 and scores.by_question["q2"].mixed == 1
    assert scores.by_question["q2"].reward == 0.25 and scores.by_question["q0"].mixed == 0
    text = scores.text()
    assert "rewards differ in 60.0% [" in text and "pass@4" in text and "majority vote of 4" in text
    assert scores.to_json()["best_of"]["2"]["value"] == scores.best_of[2].value
    [first, *_] = [row for row in sampled if row.row.question == "q4"]
    shown = first.to_json()
    assert [one["right"] for one in shown["samples"]] == [False, True, True, True]
    assert shown["predicted"] == first.row.answer and shown["right"]


def test_three_samples_have_an_estimate_for_each_power_of_two_and_all():
    row = questions(1)[0]
    scores = SampleScores.of([sampled_question(row, [answer("no")] * 3)], Sampling(3), 0)
    assert list(scores.best_of) == [1, 2, 3] and scores.best_of[3].interval is None
    assert "none" in scores.text()


def test_another_metric_gives_rewards_to_the_questions_to_which_it_applies():
    labelled, other = questions(1)[:2]
    labelled = replace(labelled, answer="polyp; z-line")
    sampled = [
        sampled_question(labelled, [answer("z-line; polyp"), answer("polyp"), answer("none")]),
        sampled_question(other, [answer("no")] * 3),
    ]
    scores = SampleScores.of(sampled, Sampling(3), 0, "label_f1")
    assert scores.num_questions == 1 and list(scores.by_question) == [labelled.question]
    assert scores.best_of[1].value == pytest.approx((1 + 2 / 3) / 3) and scores.best_of[3].value == 1
    assert scores.vote.value == scores.likeliest.value == 1 and scores.mixed.value == 1
    assert "best of 2" in scores.text() and "F1 of labels" in scores.text()
