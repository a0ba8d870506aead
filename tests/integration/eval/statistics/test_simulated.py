"""How often intervals and tests are right, on simulated test sets whose questions about one image are correlated.

Run as a program, with the number of test sets, it prints the table of docs/compare.md.
"""

from __future__ import annotations

import re
import sys
from statistics import NormalDist

import numpy as np
import pytest

from lookonce.eval.statistics import difference_ends, share_ends, sign_flip_p

SIMULATED = 2000
"""Test sets of each kind; shares of them have a standard error of 0.5 points."""
IMAGES = [20, 60, 200, 975]
SHARES = [0.5, 0.8, 0.9, 0.97, 0.99]
QUESTIONS = {"one": (1, 2), "1 to 17": (1, 18), "9": (9, 10)}
"""The fewest questions an image, and one more than the most."""
QUANTILE = np.vectorize(NormalDist().inv_cdf)


def asked(questions: str, images: int, rng: np.random.Generator, simulated: int = SIMULATED) -> np.ndarray:
    return rng.integers(*QUESTIONS[questions], (images, simulated))


def right_answers(share: float, asked: np.ndarray, correlation: float, rng: np.random.Generator) -> np.ndarray:
    """Numbers of right answers by image; the answers about one image are right or wrong together."""
    total = (1 - correlation) / correlation
    return rng.binomial(asked, rng.beta(share * total, (1 - share) * total, asked.shape)).astype(float)


def differences(shares: tuple[float, float], asked: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Right answers of one run less those of another, by image: hard images and hard questions are so for both."""
    of_image, sums = rng.standard_normal(asked.shape), np.zeros(asked.shape)
    own = [rng.standard_normal(asked.shape) for _ in shares]
    for number in range(asked.max()):
        of_question = rng.standard_normal(asked.shape)
        for share, sign, image in zip(shares, (1, -1), own, strict=True):
            noise = rng.standard_normal(asked.shape)
            ease = 0.45 * of_image + 0.45 * image + 0.6 * of_question + 0.485 * noise  # variance 1
            sums += sign * ((ease < QUANTILE(share)) & (number < asked))
    return sums


def coverage(ends: np.ndarray, truth: float) -> float:
    """The share of intervals that hold the truth."""
    return float(np.mean((ends[0] <= truth + 1e-9) & (truth - 1e-9 <= ends[1])))


def table_row(images: int, share: float, simulated: int) -> list[float]:
    """How often intervals hold the truth: of a score with correlations of 0.2 and 0.5, and of the difference of two
    equal models, with errors that are alike and with errors of their own."""
    rng, found = np.random.default_rng(images), []
    for questions, correlation in (("9", 0.2), ("1 to 17", 0.5)):
        asked_CK = asked(questions, images, rng, simulated)
        found.append(coverage(share_ends(right_answers(share, asked_CK, correlation, rng), asked_CK), share))
    asked_CK = asked("9", images, rng, simulated)
    found.append(coverage(difference_ends(differences((share, share), asked_CK, rng), asked_CK), 0))
    asked_CK = asked("1 to 17", images, rng, simulated)
    first, second = (right_answers(share, asked_CK, 0.5, rng) for _ in range(2))
    return [*found, coverage(difference_ends(second - first, asked_CK), 0)]


@pytest.mark.guarantee(
    "A 95 % interval of a score holds the truth 93 to 99 % of the time, 92 % where half of the variance is between"
    " images of very different numbers of questions, and that of a difference 93 % or more: simulated with correlated"
    " questions, 20 to 975 images and scores of 50 to 99 %."
)
def test_the_table_of_the_page_is_what_the_intervals_do(root):
    """The page has 20,000 test sets of each kind; here shares have a standard error of 0.6 points at most."""
    rows = re.findall(r"^\| (\d+) \| (\d+) % \| (.*) \|$", (root / "docs" / "compare.md").read_text(), re.M)
    assert len(rows) == 9
    for images, share, cells in rows:
        shown = [float(cell) / 100 for cell in cells.split(" | ")]
        assert min(shown) >= 0.915 and min(shown[2:]) >= 0.94
        assert table_row(int(images), int(share) / 100, 2000) == pytest.approx(shown, abs=0.02)


@pytest.mark.parametrize(
    ("images", "correlation"), [*((images, one) for images in IMAGES[:3] for one in (0.05, 0.2, 0.5)), (975, 0.2)]
)
def test_the_interval_of_a_score_holds_the_truth_93_to_99_percent_of_the_time(images, correlation):
    for share in SHARES:
        for questions in QUESTIONS:
            rng = np.random.default_rng(0)
            asked_CK = asked(questions, images, rng)
            found = coverage(share_ends(right_answers(share, asked_CK, correlation, rng), asked_CK), share)
            assert 0.93 <= found <= 0.995, (share, questions, found)


@pytest.mark.parametrize("images", IMAGES[:3])
@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.9, 0.9), (0.97, 0.97), (0.9, 0.8), (0.97, 0.93), (0.99, 0.97)])
def test_the_interval_of_a_difference_holds_the_truth_at_least_93_percent_of_the_time(images, shares):
    for questions in ("one", "9"):
        rng = np.random.default_rng(0)
        asked_CK = asked(questions, images, rng)
        found = coverage(difference_ends(differences(shares, asked_CK, rng), asked_CK), shares[0] - shares[1])
        assert found >= 0.93, (questions, found)


def test_intervals_over_questions_would_be_too_short():
    rng = np.random.default_rng(0)
    asked_CK = asked("9", 200, rng)
    num_asked, share = asked_CK.sum(axis=0), 0.9
    found = right_answers(share, asked_CK, 0.2, rng).sum(axis=0) / num_asked
    error = 1.96 * np.sqrt(found * (1 - found) / num_asked)
    assert coverage(np.stack([found - error, found + error]), share) < 0.85


@pytest.mark.guarantee(
    "Between equal runs, a sign-flip test gives a p value of at most p in at most a share p of the cases."
)
def test_sign_flips_are_honest_with_correlated_questions():
    rng = np.random.default_rng(3)
    by_image = rng.binomial(9, rng.beta(0.5, 2, (100, 1000))) * rng.choice([-1, 1], (100, 1000))
    p = sign_flip_p(by_image.astype(float))
    assert 0.03 <= np.mean(p < 0.05) <= 0.07


if __name__ == "__main__":
    for images in (30, 100, 500):
        for share in (0.5, 0.9, 0.97):
            cells = [f"{100 * found:.1f}" for found in table_row(images, share, int(sys.argv[1]))]
            print(f"| {images} | {100 * share:.0f} % | {' | '.join(cells)} |", flush=True)
