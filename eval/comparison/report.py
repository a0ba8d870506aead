"""A comparison as text: the runs, the pairs, and what the figures of each pair mean in a sentence."""

from __future__ import annotations

import string
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lookonce.eval.comparison.compare import LEVEL, Candidate, Comparison, Pair
from lookonce.eval.comparison.metric import FEW_RIGHT, NAMES, SENTENCE
from lookonce.eval.statistics import MIN_CLUSTERS, Interval
from lookonce.text import count, listed, table, terminal_width

WIDTH = 80
PAIRS = ("pair", "points", "95% interval", "p (Holm)", "only one right", "McNemar p")
FEW_IMAGES = f"all questions are about fewer than {MIN_CLUSTERS} images, so there is no interval"
EXACT_MATCH_IS_POOR = (
    f"Only exact match was compared, which says little about these answers: half of the references have {SENTENCE} "
    f"words or more, or no run has {FEW_RIGHT:.0%} right. To compare the words of the answers: lookonce compare RUN "
    "RUN --metric token_f1"
)


def to_text(comparison: Comparison) -> str:
    """Two tables with a letter for each run, and a sentence for each pair."""
    letters = dict(zip((one.name for one in comparison.candidates), _letters(len(comparison.candidates)), strict=True))
    width = terminal_width() or WIDTH
    header = ("run", NAMES[comparison.metric], "95% interval", "majority", "seeds differ by")
    runs = table(header, [_run_row(one, letters[one.name]) for one in comparison.candidates], width)
    columns = len(PAIRS) if comparison.metric == "exact_match" else len(PAIRS) - 2
    pairs = table(PAIRS[:columns], [_pair_row(pair, letters)[:columns] for pair in comparison.pairs], width)
    asked = f"{count(comparison.num_questions, 'question')} about {count(comparison.num_images, 'image')}"
    sentences = [textwrap.fill(sentence(pair, comparison.num_questions), WIDTH) for pair in comparison.pairs]
    notes = [textwrap.fill(note, WIDTH) for note in _notes(comparison)]
    return "\n\n".join([asked, runs, pairs, *sentences, *notes])


def to_json(comparison: Comparison) -> dict[str, Any]:
    """All figures, and for each pair the better one and the sentence."""
    said = [{"better": pair.better, "sentence": sentence(pair, comparison.num_questions)} for pair in comparison.pairs]
    value = asdict(comparison)
    value["pairs"] = [figures | words for figures, words in zip(value["pairs"], said, strict=True)]
    return value


def sentence(pair: Pair, num_questions: int) -> str:
    """What the figures of a pair mean: the better one, or why the two are not distinguishable."""
    better = pair.better
    if better:
        worse = pair.first if better == pair.second else pair.second
        more = f"answers {_points(pair)} more questions exactly right than"
        if pair.metric != "exact_match":
            more = f"scores {_points(pair)} more {NAMES[pair.metric]} than"
        return f"{better} {more} {worse} ({_figures(pair)})."
    start = f"{pair.first} and {pair.second} are not distinguishable:"
    if pair.only_first == pair.only_second == 0:
        return f"{start} they answer the same of the {num_questions:,} questions right."
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
    return f"{points:.1f} points" if points >= 0.05 else f"{points:.2f} points"


def _figures(pair: Pair) -> str:
    """The interval of the difference, in the direction of the sentence, and p."""
    assert pair.interval is not None
    low, high = pair.interval if pair.difference >= 0 else (-pair.interval.high, -pair.interval.low)
    return f"95% interval {Interval(low, high).in_percent()}, p after Holm {shown_p(pair.p_holm)}"


def shown_p(value: float) -> str:
    """A p value as text."""
    if value < 0.0001:
        return "<0.0001"
    return f"{value:.4f}" if value < 0.001 else f"{value:.3f}"


def _run_row(one: Candidate, letter: str) -> tuple[str, ...]:
    spread = "" if one.spread is None else f"{100 * one.spread:.1f} points"
    return f"{letter}  {one.name}", f"{one.score:.1%}", _interval(one.interval), f"{one.majority:.1%}", spread


def _pair_row(pair: Pair, letters: dict[str, str]) -> tuple[str, ...]:
    only = "" if pair.only_first is None else f"{pair.only_second:,} : {pair.only_first:,}"
    mcnemar = "" if pair.p_mcnemar is None else shown_p(pair.p_mcnemar)
    name = f"{letters[pair.second]} - {letters[pair.first]}"
    return name, f"{100 * pair.difference:+.1f}", _interval(pair.interval), shown_p(pair.p_holm), only, mcnemar


def _interval(interval: Interval | None) -> str:
    return "none" if interval is None else interval.in_percent()


def _notes(comparison: Comparison) -> list[str]:
    """How the figures were computed, and what they do not hold."""
    notes = [
        "Intervals take images as independent, and not questions. p: sign flips by image, corrected for "
        f"{count(len(comparison.pairs), 'pair')} (Holm)."
    ]
    if comparison.metric == "exact_match":
        notes[0] += " McNemar takes questions of one image as independent."
    if comparison.is_exact_match_poor:
        notes.append(EXACT_MATCH_IS_POOR)
    if comparison.prompts:
        whose = listed([f"{name}: {answers}" for name, answers in comparison.prompts.items()], len(comparison.prompts))
        notes.append(
            f"The prompts have earlier answers of different kinds ({whose}), so models are not compared alone."
        )
    if comparison.num_images < MIN_CLUSTERS:
        notes.append(f"No intervals: {FEW_IMAGES}.")
    knows_seeds = any(one.spread is not None for one in comparison.candidates)
    if not knows_seeds and not any(pair.are_seeds for pair in comparison.pairs):
        notes.append(
            "The intervals do not hold the chance of training: train each variant with at least three values of "
            "train.seed and name all of the runs."
        )
    return notes


def _letters(number: int) -> Sequence[str]:
    """A letter for each run, or a number if there are too many."""
    many = [str(one) for one in range(1, number + 1)]
    return string.ascii_uppercase[:number] if number <= len(string.ascii_uppercase) else many
