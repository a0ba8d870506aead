"""Scores of several samples of each question: how often some are right, and whether their rewards differ.

Q questions, S samples.

A sample's reward is what it scores by the metric that counts. The best of `k` samples is estimated from all `n` without
bias: the mean over all choices of `k` of them (pass@k of Chen et al. 2021, arXiv 2107.03374, in a form for any reward).
Two choices need no references: the answer that most samples give (self-consistency, arXiv 2203.11171), of equally many
the one drawn first; and the sample with the highest log-probability. Training by rewards learns from the questions
whose samples have different rewards, so their share is what it can use. Intervals are over images.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.decoding.sampling import Sampling
from lookonce.eval.scores.metric import EXACT, Scorer, name_of
from lookonce.eval.scores.prediction import MAX_GROUPS, Prediction
from lookonce.eval.statistics import Interval, clusters_of, share_interval
from lookonce.text import count, nfc, rows, share, table

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class SampledQuestion:
    row: Prediction
    """The question with the answer that most samples give."""
    samples: tuple[Answer, ...]

    def to_json(self) -> dict[str, Any]:
        """The row of a prediction, and the samples in the order in which they are numbered."""
        samples = [
            {"answer": sample.text, "right": self.row.accepts(sample.text)}
            | {name: getattr(sample, name) for name in ("logprob", "num_tokens", "ended")}
            for sample in self.samples
        ]
        return self.row.to_json() | {"samples": samples}


def most_given(samples: Sequence[Answer]) -> Answer:
    """The first sample that has the answer of most."""
    texts = [_compared(sample.text) for sample in samples]
    [(most, _)] = Counter(texts).most_common(1)  # of equally many the first
    return samples[texts.index(most)]


def _compared(text: str) -> str:
    return nfc(text).strip()


def best_of(rewards_QS: Matrix, num: int) -> Vector:
    """The mean over all choices of `num` samples of the best reward among them, for each question."""
    num_samples = rewards_QS.shape[1]
    weights = [comb(rank, num - 1) / comb(num_samples, num) for rank in range(num_samples)]
    best: Vector = np.sort(rewards_QS, axis=1) @ np.array(weights)
    return best


@dataclass(frozen=True)
class Estimate:
    """A mean over questions, and its 95 % interval; None if there are too few images."""

    value: float
    interval: Interval | None

    def line(self, name: str) -> tuple[str, str, str]:
        return name, f"{self.value:.1%}", self.interval.in_percent() if self.interval else "none"


@dataclass(frozen=True)
class Learnable:
    """The questions of one text."""

    num_questions: int
    reward: float
    mixed: float
    """The share whose samples have different rewards."""


@dataclass(frozen=True)
class SampleScores:
    """What the samples of some questions score, over the questions to which the metric applies."""

    sampling: Sampling
    seed: int
    metric: str
    num_questions: int
    best_of: dict[int, Estimate]
    """The reward of the best of some samples, by their number; pass@k if the metric is exact match."""
    vote: Estimate
    """The reward of the answer that most samples give."""
    likeliest: Estimate
    """The reward of the sample with the highest log-probability."""
    mixed: Estimate
    """The share of questions whose samples have different rewards."""
    all_right: float
    none_right: float
    """The shares of questions whose samples all have the reward 1, or all 0."""
    distinct: float
    """Different answers to a question, on average."""
    cut: float
    """The share of samples that ended at the largest number of new tokens."""
    by_question: dict[str, Learnable]

    @classmethod
    def of(
        cls, questions: Sequence[SampledQuestion], sampling: Sampling, seed: int, metric: str = EXACT
    ) -> SampleScores:
        """Score the samples of some questions; the metric must apply to one of them."""
        num_samples, scorer = sampling.num_samples, Scorer([question.row for question in questions], metric)
        texts_of = zip(*([sample.text for sample in question.samples] for question in questions), strict=True)
        rewards_QS = np.stack([scorer(texts) for texts in texts_of], axis=1)
        vote_Q = scorer([question.row.predicted for question in questions])
        questions = [questions[number] for number in scorer.numbers]
        clusters = clusters_of([question.row.sources for question in questions])

        def estimate(values_Q: Vector) -> Estimate:
            return Estimate(float(values_Q.mean()), share_interval(values_Q, clusters))

        logprobs_QS = np.array([[sample.logprob for sample in question.samples] for question in questions])
        likeliest_Q = logprobs_QS.argmax(axis=1)
        mixed_Q = (rewards_QS.max(axis=1) != rewards_QS.min(axis=1)).astype(np.float64)
        numbers = defaultdict(list)
        for number, question in enumerate(questions):
            numbers[question.row.question].append(number)
        samples = [sample for question in questions for sample in question.samples]
        return cls(
            sampling=sampling,
            seed=seed,
            metric=metric,
            num_questions=len(questions),
            best_of={num: estimate(best_of(rewards_QS, num)) for num in _powers(num_samples)},
            vote=estimate(vote_Q),
            likeliest=estimate(rewards_QS[np.arange(len(questions)), likeliest_Q]),
            mixed=estimate(mixed_Q),
            all_right=float((rewards_QS.min(axis=1) == 1).mean()),
            none_right=float((rewards_QS.max(axis=1) == 0).mean()),
            distinct=float(np.mean([len({_compared(one.text) for one in each.samples}) for each in questions])),
            cut=share(sum(sample.ended == "length" for sample in samples), len(samples)),
            by_question={
                text: Learnable(len(chosen), float(rewards_QS[chosen].mean()), float(mixed_Q[chosen].mean()))
                for text, chosen in sorted(numbers.items())
            },
        )

    def text(self) -> str:
        """The question texts from which most can be learned, the scores, and how many can."""
        num, asked = self.sampling.num_samples, count(self.num_questions, "question")
        most = sorted(self.by_question.items(), key=lambda item: -item[1].mixed * item[1].num_questions)[:MAX_GROUPS]
        texts = [(text, f"{of.num_questions:,}", f"{of.reward:.1%}", f"{of.mixed:.1%}") for text, of in most]
        best = "pass@" if self.metric == EXACT else "best of "
        if more := len(self.by_question) - len(most):
            texts.append((f"{more:,} other question texts", "", "", ""))
        scores = [estimate.line(f"{best}{number}") for number, estimate in self.best_of.items()]
        scores += [self.vote.line(f"majority vote of {num}"), self.likeliest.line(f"likeliest of {num}")]
        interval = f" [{self.mixed.interval.in_percent()}]" if self.mixed.interval else ""
        notes = [
            (
                "samples",
                f"{num} of each of {asked}, temperature {self.sampling.temperature:g}, top-p {self.sampling.top_p:g}",
            ),
            ("to learn", f"rewards differ in {self.mixed.value:.1%}{interval} of the questions"),
            ("others", f"all samples score 100% in {self.all_right:.1%}, and all 0% in {self.none_right:.1%}"),
            ("answers", f"{self.distinct:.1f} different ones to a question, {self.cut:.1%} of the samples cut off"),
        ]
        header = ("question", "asked", name_of(self.metric), "rewards differ")
        by_samples = table(("of samples", name_of(self.metric), "95% interval"), scores)
        blocks = (table(header, texts), by_samples, rows(notes))
        return "\n\n".join(blocks)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"best_of": {str(number): asdict(estimate) for number, estimate in self.best_of.items()}}


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
