"""All other metrics beside the majority answers, and what is wrong in kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookonce.eval.scores.figures import Figure
from lookonce.eval.scores.headline import NAMES
from lookonce.page import table
from lookonce.report.part import Part
from lookonce.report.runs import ReportedRun

TITLE = "Other metrics"
DISTANCES = ("point_distance", "point_distance_median")
"""Figures that are not shares but in the units of the answers."""
NUMBERS = ("metrics", "counts")
"""Keys of the evaluation that are shown."""
COUNTS = {
    "distinct_wrong": "different wrong answers",
    "empty": "empty answers",
    "cut": "answers cut at the token limit",
    "outside_training": "answers that training never had",
}


def metrics(runs: Sequence[ReportedRun]) -> Part:
    """A line for each metric, with a column for each run."""
    scored = [run for run in runs if run.metrics.get("metrics")]
    if not scored:
        return Part("metrics", TITLE, "Nothing is evaluated yet.")
    keys = dict.fromkeys(key for run in scored for key in run.metrics["metrics"])
    others = [f"{NAMES[key]}, {run.name}" if len(runs) > 1 else NAMES[key] for run, key in _conditions(scored)]
    header = ("metric", "asked", *(run.name for run in scored), "majority", *others, "at most")
    numbers = {run.name: {name: run.metrics.get(name) for name in NUMBERS} for run in scored}
    tables = [table(header, [_line(key, scored) for key in keys])]
    tables.append(table(("answers", *(run.name for run in scored)), _counts(scored)))
    return Part("metrics", TITLE, _text(scored), numbers, tables)


def _text(runs: Sequence[ReportedRun]) -> str:
    missing = next((run.metrics["text_metrics"] for run in runs if "pip install" in run.metrics["text_metrics"]), "")
    start = "Shares of the questions to which a metric applies; at most: what the references themselves score."
    return f"{start} BLEU, ROUGE, METEOR and chrF are {missing}." if missing else start


def _line(key: str, runs: Sequence[ReportedRun]) -> list[str]:
    """Name, questions, each run, the majority answers, what other baselines score, the highest value."""
    found = [_figure(key, run.metrics["metrics"].get(key)) for run in runs]
    conditions = [run.conditions[other].get("metrics", {}).get(key) for run, other in _conditions(runs)]
    beside = [one and one["model"] for one in conditions]
    name, asked, _, *others = next(one.line(beside) for one in found if one)
    return [name, asked, *(one.line()[2] if one else "" for one in found), *others]


def _conditions(runs: Sequence[ReportedRun]) -> list[tuple[ReportedRun, str]]:
    """The baselines that a model has answered, of each run."""
    return [(run, key) for run in runs for key in run.conditions]


def _figure(key: str, value: dict[str, Any] | None) -> Figure | None:
    return Figure(**value, is_share=key not in DISTANCES) if value else None


def _counts(runs: Sequence[ReportedRun]) -> list[list[str]]:
    known = [(words, [run.metrics["counts"].get(key) for run in runs]) for key, words in COUNTS.items()]
    return [
        [words, *("" if number is None else f"{number:,}" for number in numbers)]
        for words, numbers in known
        if any(number is not None for number in numbers)
    ]
