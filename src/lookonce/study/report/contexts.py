"""Own, true and no earlier answers of arms with `data.context`, as tables."""

from __future__ import annotations

from typing import Any

from lookonce.report.contexts import HEADER, KINDS, PAIRS, Cell, ContextScores, context_cells
from lookonce.study.report.tables import Table, ends
from lookonce.text import table


def context_table(one: ContextScores) -> Table:
    """A line for all questions of an arm, and one for each stage."""
    columns: dict[str, Any] = {"questions": list(one.num_questions), "num_questions": list(one.num_questions.values())}
    for name in (*KINDS, *PAIRS):
        by_group = (one.exact_match | one.differences).get(name, {})
        found = [by_group.get(group) for group in one.num_questions]
        column = name.replace(" - ", "_less_")
        columns[column] = [estimate.value if estimate else None for estimate in found]
        columns |= ends(column, [estimate.interval if estimate else None for estimate in found])
    lines = [[group, *map(_with_interval, cells)] for group, cells in context_cells(one).items()]
    return Table(f"contexts-{one.name}", HEADER, lines, columns)


def context_text(one: ContextScores) -> str:
    """The same in 80 columns, where only differences have intervals; and the commands that ask what is absent."""
    lines = [
        [group, *(words for words, _ in cells[: len(KINDS)]), *map(_with_interval, cells[len(KINDS) :])]
        for group, cells in context_cells(one).items()
    ]
    missing = [f"not asked yet; run: {line}" for line in one.not_asked]
    return "\n".join([f"{one.title} with own, true and no earlier answers", table(HEADER, lines), *missing])


def _with_interval(cell: Cell) -> str:
    words, interval = cell
    return f"{words} [{interval}]" if interval else words
