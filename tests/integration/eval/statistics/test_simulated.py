"""Simulated test sets with correlated questions: intervals and tests of differences are right as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from lookonce.eval.statistics.bootstrap import ratio_intervals
from lookonce.eval.statistics.significance import mcnemar_p, sign_flip_p

SIMULATED, IMAGES, CORRELATION = 1000, 200, 0.2


def simulated_answers(share: float, asked: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Numbers of right answers by image; the answers about one image are right or wrong together."""
    total = (1 - CORRELATION) / CORRELATION
    return rng.binomial(asked, rng.beta(share * total, (1 - share) * total, asked.shape)).astype(float)


def simulated(what: str, images: int = IMAGES, shares: tuple[float, float] = (0.9, 0.8)) -> tuple[np.ndarray, ...]:
    """Sums by image of simulated test sets, questions by image, and the naive standard errors."""
    rng = np.random.default_rng(0)
    asked = rng.integers(1, 18, (images, SIMULATED))
    num_asked = asked.sum(axis=0)
    right = simulated_answers(shares[0], asked, rng)
    share = right.sum(axis=0) / num_asked
    if what == "share":
        return right, asked.astype(float), np.sqrt(share * (1 - share) / num_asked)
    other = simulated_answers(shares[1], asked, rng)
    other_share = other.sum(axis=0) / num_asked
    variance = share * (1 - share) + other_share * (1 - other_share)
    return right - other, asked.astype(float), np.sqrt(variance / num_asked)


@pytest.mark.parametrize(("what", "truth"), [("share", 0.9), ("difference", 0.1)])
def test_intervals_hold_the_truth_95_percent_of_the_time_and_naive_ones_do_not(what, truth):
    sums, asked, naive_error = simulated(what)
    low, high = ratio_intervals(sums, asked)
    assert 0.93 <= np.mean((low <= truth) & (truth <= high)) <= 0.97
    from_truth = np.abs(sums.sum(axis=0) / asked.sum(axis=0) - truth)
    assert np.mean(from_truth <= 1.96 * naive_error) < 0.85


def test_runs_that_are_equally_good_are_rarely_apart_even_on_few_images():
    sums, asked, _ = simulated("difference", images=30, shares=(0.95, 0.95))
    low, high = ratio_intervals(sums[:, :400], asked[:, :400])
    assert np.mean((low <= 0) & (0 <= high)) > 0.9  # 0.87 with BCa's corrections


def test_sign_flips_are_honest_with_correlated_questions_and_mcnemar_is_not():
    rng = np.random.default_rng(3)
    by_image = rng.binomial(9, rng.beta(0.5, 2, (100, 1000))) * rng.choice([-1, 1], (100, 1000))
    p = sign_flip_p(by_image.astype(float))
    assert 0.03 <= np.mean(p < 0.05) <= 0.07
    won, lost = by_image.clip(0).sum(axis=0), (-by_image).clip(0).sum(axis=0)
    naive = [mcnemar_p(int(one), int(other)) for one, other in zip(won[:200], lost[:200], strict=True)]
    assert np.mean(np.array(naive) < 0.05) > 0.15
