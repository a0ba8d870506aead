"""Scores of several runs with their intervals, and for each pair whether the difference is more than chance.

Q questions, R runs, C candidates, P pairs.

Design: intervals and tests are over images, not questions, since the answers about one image are right or wrong
together. An interval over images holds the chance of the test set and not that of training. So runs that are seeds of
one another are one *candidate*: its score is their mean, and its spread is from the worst to the best of them. A
difference counts only if its interval does not hold 0, its p after Holm's correction is below 5 %, and it is larger
than the spread of either candidate. Runs that are all seeds of one training are compared with each other, and none of
them is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import UsageError
from lookonce.eval.comparison.join import Joined, join
from lookonce.eval.comparison.metric import Metric
from lookonce.eval.comparison.runs import Run
from lookonce.eval.statistics import Interval, difference_interval, holm, mcnemar_p, share_interval, sign_flip_p, totals

MAX_PAIRS = 2000
"""The most pairs that are compared; each takes 10,000 resamples."""
LEVEL = 0.05
"""The largest p, after Holm's correction, of a difference that is called one."""


@dataclass(frozen=True)
class Candidate:
    """A run, or several that are seeds of one another."""

    name: str
    runs: list[str]
    seeds: list[int]
    """The training seeds of the runs, where they are known."""
    exact_match: float
    """The share of right answers; of several runs the mean."""
    score: float
    """What the answers score by the metric that is compared; of several runs the mean."""
    interval: Interval | None
    """The interval of the score."""
    majority: float
    """What the majority answers score."""
    spread: float | None
    """The score of the best seed less that of the worst; None for one run."""


@dataclass(frozen=True)
class Pair:
    """How the second candidate compares with the first."""

    first: str
    second: str
    difference: float
    """The score of the second less that of the first."""
    interval: Interval | None
    p: float
    """The p of the sign flips by image."""
    p_holm: float
    only_first: int | None
    """Questions that only the first answers right; None for means over seeds, and if exact match is not compared."""
    only_second: int | None
    p_mcnemar: float | None
    """Exact, as if questions were independent."""
    spread: float | None
    """The larger spread of the two; None without seeds."""
    are_seeds: bool
    """Whether the two are the same training with other seeds."""
    metric: Metric = "exact_match"

    @property
    def is_apart(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high

    @property
    def better(self) -> str | None:
        """The better one; None if they are not distinguishable."""
        exceeds_seeds = not self.are_seeds and abs(self.difference) > (self.spread or 0)
        if not (self.is_apart and exceeds_seeds and self.p_holm < LEVEL):
            return None
        return self.second if self.difference > 0 else self.first


@dataclass(frozen=True)
class Comparison:
    """Candidates on the same questions, and the pairs of them that were compared."""

    num_questions: int
    num_images: int
    """Images; those that share a question count as one."""
    candidates: list[Candidate]
    pairs: list[Pair]
    prompts: dict[str, str] = field(default_factory=dict)
    """Whose answers stand in the prompts of each run, if runs differ in it."""
    metric: Metric = "exact_match"
    """What is compared."""
    is_exact_match_poor: bool = False
    """Whether exact match is compared, and says little about these answers."""


def compare(runs: Sequence[Run], *, with_first_only: bool = False, metric: Metric = "exact_match") -> Comparison:
    """Compare every two candidates by a metric, or only all others with the first.

    Raises:
        UsageError: the runs answered different questions.
    """
    joined = join(runs, metric)
    groups = _groups(runs)
    are_seeds = len(groups) == 1
    if are_seeds:
        groups = [[number] for number in range(len(runs))]
    num_pairs = len(groups) - 1 if with_first_only else comb(len(groups), 2)
    if num_pairs > MAX_PAIRS:
        raise UsageError(
            f"{len(groups):,} runs are {num_pairs:,} pairs; at most {MAX_PAIRS:,} are compared: compare fewer runs, or "
            "all others with one (--baseline RUN; in a study file `compare.baseline`)"
        )
    score_QC = np.stack([joined.score_QR[:, group].mean(axis=1) for group in groups], axis=1)
    chosen = [pair for pair in combinations(range(len(groups)), 2) if pair[0] == 0 or not with_first_only]
    differences_QP = np.stack([score_QC[:, second] - score_QC[:, first] for first, second in chosen], axis=1)
    candidates = [_candidate([runs[number] for number in group], joined, group) for group in groups]
    p_values = sign_flip_p(totals(differences_QP, joined.clusters)).tolist()
    of_pairs = [difference_interval(difference_Q, joined.clusters) for difference_Q in differences_QP.T]
    tested = zip(chosen, of_pairs, p_values, holm(p_values), strict=True)
    pairs = [
        _pair((candidates[first], candidates[second]), score_QC[:, [first, second]], interval, ps, are_seeds, metric)
        for (first, second), interval, *ps in tested
    ]
    num_images = int(joined.clusters.max(initial=-1)) + 1
    prompts = {run.name: _prompts(run) for run in runs}
    differing = prompts if len({*prompts.values()}) > 1 else {}
    is_poor = metric == "exact_match" and joined.is_exact_match_poor
    return Comparison(len(joined.clusters), num_images, candidates, pairs, differing, metric, is_poor)


def _prompts(run: Run) -> str:
    """Whose answers stand in the prompts of a run: its own, or true ones, as those of earlier versions all were."""
    rows = run.predictions
    whose = {one.earlier_answers or "true" for one in rows if one.earlier}
    whose |= {one.context_answers or "true" for one in rows if one.context}
    return " and ".join(sorted(whose)) or "none"


def _groups(runs: Sequence[Run]) -> list[list[int]]:
    """The numbers of the runs of each candidate. A run with the same seed as another is a candidate of its own."""
    seen: Counter[tuple[str, int | None]] = Counter()
    groups: dict[Hashable, list[int]] = {}
    for number, run in enumerate(runs):
        same = seen[run.training, run.seed]
        groups.setdefault((run.training, same) if run.training else number, []).append(number)
        seen[run.training, run.seed] += 1
    return list(groups.values())


def _candidate(runs: Sequence[Run], joined: Joined, group: list[int]) -> Candidate:
    by_run = joined.score_QR[:, group].mean(axis=0)
    return Candidate(
        name=runs[0].name if len(runs) == 1 else f"{runs[0].name} ({len(runs)} seeds)",
        runs=[run.name for run in runs],
        seeds=[run.seed for run in runs if run.seed is not None],
        exact_match=float(joined.right_QR[:, group].mean(axis=0).mean()),
        score=float(by_run.mean()),
        interval=share_interval(joined.score_QR[:, group].mean(axis=1), joined.clusters),
        majority=float(joined.majority_QR[:, group].mean()),
        spread=float(by_run.max() - by_run.min()) if len(runs) > 1 else None,
    )


def _pair(
    both: tuple[Candidate, Candidate],
    score_Q2: NDArray[np.float64],
    interval: Interval | None,
    ps: Sequence[float],
    are_seeds: bool,
    metric: Metric,
) -> Pair:
    (first, second), (p, p_holm) = both, ps
    is_counted = metric == "exact_match" and len(first.runs) == len(second.runs) == 1
    only_first, only_second = (int(np.sum(score_Q2[:, one] > score_Q2[:, 1 - one])) for one in (0, 1))
    spreads = [one.spread for one in both if one.spread is not None]
    return Pair(
        first=first.name,
        second=second.name,
        difference=second.score - first.score,
        interval=interval,
        p=p,
        p_holm=p_holm,
        only_first=only_first if is_counted else None,
        only_second=only_second if is_counted else None,
        p_mcnemar=mcnemar_p(only_first, only_second) if is_counted else None,
        spread=max(spreads, default=None),
        are_seeds=are_seeds,
        metric=metric,
    )
