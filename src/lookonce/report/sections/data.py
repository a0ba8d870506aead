"""The records: how many, which images training has seen, and what was left out and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.page import sentences, table
from lookonce.report.data import SplitFacts, overlap
from lookonce.report.part import Part, merged
from lookonce.report.runs import ReportedRun
from lookonce.text import count, shell

TITLE = "Data and leaks"


def data(runs: Sequence[ReportedRun]) -> Part:
    """A table of the splits, and sentences on each run."""
    numbers = {run.name: _numbers(run) for run in runs if run.settings}
    if not numbers:
        return Part("data", TITLE, "No run folder, so the records are not known.")
    said = [(run.name, line) for run in runs if run.settings for line in _said(run, numbers[run.name])]
    return Part("data", TITLE, "", numbers, [*_splits(runs), sentences(merged(said, len(runs)))])


def _splits(runs: Sequence[ReportedRun]) -> list[Element]:
    """A table of the splits; runs with the same splits are named together."""
    names: dict[tuple[str, SplitFacts], list[str]] = {}
    for run in runs:
        for split, one in run.data.splits.items():
            names.setdefault((split, one), []).append(run.name)
    lines = [
        (split, f"{one.num_records:,}", f"{one.num_questions:,}", f"{one.num_images:,}", ", ".join(some))
        for (split, one), some in names.items()
    ]
    return [table(("split", "records", "questions", "images", "run"), lines)] if lines else []


def _numbers(run: ReportedRun) -> dict[str, Any]:
    predictions = run.answers.predictions if run.answers else []
    return {
        "splits": {split: vars(one) for split, one in run.data.splits.items()},
        "problem": run.data.problem,
        "seen_in_training": overlap(predictions, run.data) if predictions and run.data.seen else None,
        "num_too_long": run.trained.get("num_too_long"),
        "prepared": dict(run.data.prepared),
    }


def _said(run: ReportedRun, numbers: dict[str, Any]) -> list[str]:
    """What is known of a run's records, a sentence each."""
    lines = [f"the records cannot be read now: {run.data.problem}"] if run.data.problem else []
    if numbers["seen_in_training"]:
        lines.append(_leak(run, numbers["seen_in_training"]))
    if numbers["num_too_long"]:
        lines.append(f"{count(numbers['num_too_long'], 'training record')} left out as too long")
    left_out = run.data.prepared.get("rows", {}).get("left_out", {})
    if left_out:
        reasons = ", ".join(f"{reason}: {number:,}" for reason, number in left_out.items())
        lines.append(f"rows that lookonce data prepare left out: {reasons}")
    return lines if run.data.problem else [*lines, _audit(run)]


def _audit(run: ReportedRun) -> str:
    """How to see more of the records than their number."""
    assert run.settings
    files = [*run.settings.data.train, *run.settings.data.val, *run.settings.data.test]
    audit = shell("lookonce", "data", "audit", *files, "--html", "audit.html")
    return f"what is in the records, and what is wrong with them: {audit}"


def _leak(run: ReportedRun, seen: dict[str, Any]) -> str:
    how = "compared by content" if seen["by_content"] else "compared by file name, which does not find renamed copies"
    if not seen["num_questions"]:
        return f"no image of {run.split} is also in training ({how})"
    others = seen["exact_match_of_others"]
    rest = "" if others is None else f"; on the others exact match is {others:.1%}"
    questions = f"{count(seen['num_questions'], 'question')} of {run.split}"
    return f"{questions} are about {count(seen['num_images'], 'image')} also in training ({how}){rest}"
