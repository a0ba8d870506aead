"""Exact match by question, category, source and stage, sorted by the gain over the majority baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.eval.scores.groups import GROUPINGS
from lookonce.eval.scores.headline import NAMES
from lookonce.page import subsection, table
from lookonce.plots import Content, share_cell
from lookonce.report.part import Part, words
from lookonce.report.runs import ReportedRun
from lookonce.report.scores import Scored
from lookonce.text import count

TITLE = "Exact match by group"
TEXT = (
    "Sorted by what the model scores above the majority answers (gain, in points). In the plots, from 0 to 100 %, a "
    "dot is the score, the line around it its 95% interval, and the vertical mark the majority baseline."
)


def groups(runs: Sequence[ReportedRun]) -> Part:
    """A table for each grouping that the records have."""
    scored = [run for run in runs if run.scores]
    tables = [element for by in GROUPINGS for element in _grouping(by, scored)]
    if not tables:
        return Part("groups", TITLE, "Nothing is evaluated yet.")
    return Part("groups", TITLE, TEXT, {run.name: _numbers(run) for run in scored}, tables)


def _grouping(by: str, runs: Sequence[ReportedRun]) -> list[Element]:
    first = _of(runs[0], by) if runs else {}
    if not first:
        return []
    names = sorted(first, key=lambda name: -first[name].gain)
    others = [(run, key) for run in runs for key in run.conditions]
    header = [by, "asked", *(run.name for run in runs), "majority", "gain"]
    header += [f"{NAMES[key]}, {run.name}" if len(runs) > 1 else NAMES[key] for run, key in others]
    lines = [
        [
            *_line(name, [_of(run, by).get(name) for run in runs]),
            *(_score(run, other, by, name) for run, other in others),
        ]
        for name in names
    ]
    more = max(run.scores.num_groups[by] for run in runs if run.scores) - len(names)
    text = f"The {len(names):,} with most questions; {count(more, 'other')}." if more > 0 else ""
    return subsection(f"By {by}", text, table(header, lines))


def _of(run: ReportedRun, by: str) -> dict[str, Scored]:
    return run.scores.groups[by] if run.scores else {}


def _line(name: str, scored: Sequence[Scored | None]) -> list[Content]:
    first = scored[0]
    assert first is not None  # the names are those of the first run
    cells = [_cell(one) if one else "" for one in scored]
    return [
        words(name),
        f"{first.num_questions:,}",
        *cells,
        f"{first.majority:.1%}",
        f"{100 * first.gain:+.1f}",
    ]


def _cell(one: Scored) -> Element:
    interval = one.interval.in_percent() if one.interval else "no interval"
    return share_cell(f"{one.exact_match:.1%}", interval, one.exact_match, one.interval, one.majority)


def _score(run: ReportedRun, other: str, by: str, name: str) -> str:
    score = _under(run, other, by, name)
    return "" if score is None else f"{score:.1%}"


def _numbers(run: ReportedRun) -> dict[str, Any]:
    numbers: dict[str, Any] = {"num_groups": run.scores.num_groups if run.scores else {}}
    for by in GROUPINGS:
        numbers[f"by_{by}"] = {
            name: asdict(one)
            | {"gain": one.gain, "baselines": {key: _under(run, key, by, name) for key in run.conditions}}
            for name, one in _of(run, by).items()
        }
    return numbers


def _under(run: ReportedRun, other: str, by: str, name: str) -> float | None:
    """The exact match of a group by a baseline; None if it is not known."""
    found = run.conditions[other].get(f"by_{by}", {}).get(name)
    return found["exact_match"] if found else None
