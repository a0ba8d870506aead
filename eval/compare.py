"""Whether one run is better than another: scores, intervals, and whether the difference of a pair is more than chance.

Q questions, R runs, C candidates, P pairs.

Intervals and tests are over images (statistics.py) and do not cover the randomness of training. So runs that are seeds
of one another are one *candidate*: its score is their mean, and its spread is from the worst to the best of them. A
difference counts only if its interval does not hold 0, its p after Holm's correction is below 5 %, and it is larger
than the spread of either candidate. Runs that are all seeds of one training are compared, and none is called better.
"""

from __future__ import annotations

import string
import textwrap
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from lookonce.eval.join import Joined, Run, join
from lookonce.eval.scores.metric import EXACT, common_metric, name_of
from lookonce.eval.scores.prediction import FEW_RIGHT, SENTENCE
from lookonce.eval.statistics import (
    MIN_CLUSTERS,
    Interval,
    difference_interval,
    holm,
    share_interval,
    sign_flip_p,
    totals,
)
from lookonce.text import count, listed, shown_p, table, terminal_width

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
    majority: float
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
    spread: float | None
    """The larger spread of the two; None without seeds."""
    are_seeds: bool
    """Whether the two are the same training with other seeds."""
    metric: str = EXACT

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
    """Which answers stand in the prompts of each run, if runs differ in it."""
    metric: str = EXACT
    """What is compared."""
    is_exact_match_poor: bool = False
    """Whether exact match is compared, and says little about these answers."""


def compare(runs: Sequence[Run], *, with_first_only: bool = False, metric: str | None = None) -> Comparison:
    """Compare every two candidates by a metric, by default that of the runs, or only all others with the first.

    Raises:
        UsageError: the runs answered different questions, or have different metrics and none is named.
    """
    metric = metric or common_metric({run.name: run.metric for run in runs})
    joined = join(runs, metric)
    groups = _groups(runs)
    are_seeds = len(groups) == 1
    if are_seeds:
        groups = [[number] for number in range(len(runs))]
    score_QC = np.stack([joined.score_QR[:, group].mean(axis=1) for group in groups], axis=1)
    chosen = [pair for pair in combinations(range(len(groups)), 2) if pair[0] == 0 or not with_first_only]
    differences_QP = np.stack([score_QC[:, second] - score_QC[:, first] for first, second in chosen], axis=1)
    candidates = [_candidate([runs[number] for number in group], joined, group) for group in groups]
    p_values = sign_flip_p(totals(differences_QP, joined.clusters)).tolist()
    pairs = []
    for numbers, difference_Q, p, p_holm in zip(chosen, differences_QP.T, p_values, holm(p_values), strict=True):
        first, second = (candidates[number] for number in numbers)
        are_counted = metric == EXACT and len(first.runs) == len(second.runs) == 1
        pairs.append(
            Pair(
                first=first.name,
                second=second.name,
                difference=second.score - first.score,
                interval=difference_interval(difference_Q, joined.clusters),
                p=p,
                p_holm=p_holm,
                only_first=int(np.sum(difference_Q < 0)) if are_counted else None,
                only_second=int(np.sum(difference_Q > 0)) if are_counted else None,
                spread=max((seeds.spread for seeds in (first, second) if seeds.spread is not None), default=None),
                are_seeds=are_seeds,
                metric=metric,
            )
        )
    num_images = int(joined.clusters.max(initial=-1)) + 1
    prompts = {run.name: _prompts(run) for run in runs}
    differing = prompts if len({*prompts.values()}) > 1 else {}
    is_poor = metric == EXACT and joined.is_exact_match_poor
    return Comparison(len(joined.clusters), num_images, candidates, pairs, differing, metric, is_poor)


def _prompts(run: Run) -> str:
    """Which answers stand in the prompts of a run: predicted, reference or none."""
    rows = run.predictions
    whose = {row.earlier_answers or "reference" for row in rows if row.earlier}
    whose |= {row.context_answers or "reference" for row in rows if row.context}
    return " and ".join(sorted(whose)) or "none"


def _groups(runs: Sequence[Run]) -> list[list[int]]:
    """The numbers of the runs of each candidate. A run with the same seed as another is a candidate of its own."""
    seen: Counter[tuple[str, int | None]] = Counter()
    groups: dict[Hashable, list[int]] = {}
    for number, run in enumerate(runs):
        repeat = seen[run.training, run.seed]
        groups.setdefault((run.training, repeat) if run.training else number, []).append(number)
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


WIDTH = 80
PAIRS = ("pair", "points", "95% interval", "p (Holm)", "only one right")
FEW_IMAGES = f"all questions are about fewer than {MIN_CLUSTERS} images, so there is no interval"
EXACT_MATCH_IS_POOR = (
    f"Only exact match was compared, which says little about these answers: half of the references have {SENTENCE} "
    f"words or more, or no run has {FEW_RIGHT:.0%} right. To compare the words of the answers: lookonce compare RUN "
    "RUN --metric token_f1"
)


def to_text(comparison: Comparison) -> str:
    """Two tables with a letter for each run, or a number if there are too many, and a sentence for each pair."""
    number = len(comparison.candidates)
    marks = string.ascii_uppercase if number <= len(string.ascii_uppercase) else map(str, range(1, number + 1))
    letters = {candidate.name: mark for candidate, mark in zip(comparison.candidates, marks, strict=False)}
    width = terminal_width() or WIDTH
    header = ("run", name_of(comparison.metric), "95% interval", "majority", "seeds differ by")
    runs = table(header, [_run_row(candidate, letters[candidate.name]) for candidate in comparison.candidates], width)
    columns = len(PAIRS) if comparison.metric == EXACT else len(PAIRS) - 1
    pairs = table(PAIRS[:columns], [_pair_row(pair, letters)[:columns] for pair in comparison.pairs], width)
    heading = f"{count(comparison.num_questions, 'question')} about {count(comparison.num_images, 'image')}"
    sentences = [textwrap.fill(sentence(pair, comparison.num_questions), WIDTH) for pair in comparison.pairs]
    notes = [textwrap.fill(note, WIDTH) for note in _notes(comparison)]
    return "\n\n".join([heading, runs, pairs, *sentences, *notes])


def to_json(comparison: Comparison) -> dict[str, Any]:
    """All figures, and for each pair the better one and the sentence."""
    verdicts = [
        {"better": pair.better, "sentence": sentence(pair, comparison.num_questions)} for pair in comparison.pairs
    ]
    value = asdict(comparison)
    value["pairs"] = [figures | words for figures, words in zip(value["pairs"], verdicts, strict=True)]
    return value


def sentence(pair: Pair, num_questions: int) -> str:
    """What the figures of a pair mean: the better one, or why the two are not distinguishable."""
    better = pair.better
    if better:
        worse = pair.first if better == pair.second else pair.second
        right = f"answers {_points(pair)} more questions exactly right than"
        more = f"scores {_points(pair)} more {name_of(pair.metric)} than"
        return f"{better} {right if pair.metric == 'exact_match' else more} {worse} ({_figures(pair)})."
    start = f"{pair.first} and {pair.second} are not distinguishable:"
    if pair.only_first == pair.only_second == 0:
        return f"{start} both answer the same questions right, of {num_questions:,}."
    if pair.interval is None:
        return f"{start} {FEW_IMAGES}."
    higher = pair.second if pair.difference > 0 else pair.first
    gap = f"{higher} is {_points(pair)} higher" if pair.difference else "their scores are equal"
    return f"{start} {gap} ({_figures(pair)}){_why(pair)}."


def _why(pair: Pair) -> str:
    """What else is in the way of a difference that its interval and p alone would show."""
    if pair.are_seeds:
        return "; they are seeds of the same training, so their difference is that of chance in training"
    if pair.spread is not None and abs(pair.difference) <= pair.spread:
        return f"; seeds of one training differ by {100 * pair.spread:.1f} points"
    return f"; p is not below {LEVEL}" if pair.is_apart else ""


def _points(pair: Pair) -> str:
    points = 100 * abs(pair.difference)
    return f"{points:.{1 if points >= 0.05 else 2}f} points"


def _figures(pair: Pair) -> str:
    """The interval of the difference, in the direction of the sentence, and p."""
    assert pair.interval is not None
    low, high = pair.interval if pair.difference >= 0 else (-pair.interval.high, -pair.interval.low)
    return f"95% interval {Interval(low, high).in_percent()}, p after Holm {shown_p(pair.p_holm)}"


def _run_row(candidate: Candidate, letter: str) -> tuple[str, ...]:
    spread = "" if candidate.spread is None else f"{100 * candidate.spread:.1f} points"
    score, majority = f"{candidate.score:.1%}", f"{candidate.majority:.1%}"
    return f"{letter}  {candidate.name}", score, _interval(candidate.interval), majority, spread


def _pair_row(pair: Pair, letters: dict[str, str]) -> tuple[str, ...]:
    only = "" if pair.only_first is None else f"{pair.only_second:,} : {pair.only_first:,}"
    name = f"{letters[pair.second]} - {letters[pair.first]}"
    return name, f"{100 * pair.difference:+.1f}", _interval(pair.interval), shown_p(pair.p_holm), only


def _interval(interval: Interval | None) -> str:
    return "none" if interval is None else interval.in_percent()


def _notes(comparison: Comparison) -> list[str]:
    """How the figures were computed, and what they do not hold."""
    notes = [
        "Majority: the score of always giving each question's most frequent training answer, no image seen. p: sign "
        f"flips by image; Holm's correction raises it, because {count(len(comparison.pairs), 'pair')} may differ by "
        "chance."
    ]
    if comparison.is_exact_match_poor:
        notes.append(EXACT_MATCH_IS_POOR)
    if comparison.prompts:
        whose = listed([f"{name}: {answers}" for name, answers in comparison.prompts.items()], len(comparison.prompts))
        notes.append(
            f"The prompts have earlier answers of different kinds ({whose}), so models and prompts are "
            "compared together."
        )
    if comparison.num_images < MIN_CLUSTERS:
        notes.append(f"No intervals: {FEW_IMAGES}.")
    knows_seeds = any(candidate.spread is not None for candidate in comparison.candidates)
    if not knows_seeds and not any(pair.are_seeds for pair in comparison.pairs):
        notes.append(
            "The intervals do not cover the randomness of training: train each variant with at least three values of "
            "train.seed and name all of the runs."
        )
    return notes
