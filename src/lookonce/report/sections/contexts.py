"""Own, true and no earlier answers in the prompts, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from xml.etree.ElementTree import Element

from lookonce.page import sentences, subsection, table
from lookonce.plots import Content, number_cell
from lookonce.report.contexts import KINDS, PAIRS, ContextScores, Estimate, context_scores
from lookonce.report.part import Part
from lookonce.report.runs import ReportedRun

TITLE = "Own, true and no earlier answers"
HEADER = ("questions", *KINDS, *PAIRS)
NOTE = (
    "Exact match by whose answers to earlier questions the prompts have. Own: the model's, stage by stage. True: those "
    "of the records, which a user does not have; they are the upper limit. None: no answers. Differences are in "
    "points, in pairs; below each figure is its 95% interval over images. Of several seeds it is the mean."
)
NOTHING = "No run that is evaluated has `data.context`."
NOT_ASKED = "not asked"
Cell = tuple[str, str]
"""A figure and its interval, as they are shown."""


def contexts(runs: Sequence[ReportedRun]) -> Part:
    """A table for each training with `data.context`; its seeds count as one.

    Raises:
        UsageError: seeds of one training answered different questions.
    """
    found = context_scores(runs)
    content = [element for one in found for element in subsection(one.title, "", *_content(one))]
    return Part("contexts", TITLE, NOTE if found else NOTHING, [asdict(one) for one in found], content)


def _content(one: ContextScores) -> list[Element]:
    lines: list[list[Content]] = [
        [group, *(number_cell(*cell) for cell in cells)] for group, cells in context_cells(one).items()
    ]
    missing = [sentences([f"Not asked yet; run: {line}" for line in one.not_asked])] if one.not_asked else []
    return [table(HEADER, lines), *missing]


def context_cells(one: ContextScores) -> dict[str, list[Cell]]:
    """The cells of a table below `HEADER`, by the questions of a line: all, then each stage."""
    return {
        group: [
            *(_share(one.exact_match.get(kind, {}).get(group)) for kind in KINDS),
            *(_points(one.differences.get(name, {}).get(group)) for name in PAIRS),
        ]
        for group in one.num_questions
    }


def _share(one: Estimate | None) -> Cell:
    return (f"{one.value:.1%}", _interval(one)) if one else (NOT_ASKED, "")


def _points(one: Estimate | None) -> Cell:
    return (f"{100 * one.value:+.1f}", _interval(one)) if one else ("", "")


def _interval(one: Estimate) -> str:
    return one.interval.in_percent() if one.interval else "no interval"
