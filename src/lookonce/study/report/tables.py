"""Tables of a report as files: CSV with the figures as they are, LaTeX with the cells as the page shows them.

Design: LaTeX needs the package booktabs. All characters that mean something in LaTeX are escaped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.datasets.text_files import safe_cell
from lookonce.eval.statistics.intervals import Interval
from lookonce.files import write_text

SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}"},
}
"""How LaTeX writes characters that mean something in it."""


@dataclass(frozen=True)
class Table:
    """A table, as it is shown and as figures."""

    name: str
    """The end of the names of its files."""
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    """The cells as they are shown."""
    columns: Mapping[str, Sequence[Any]]
    """The figures by the name of their column; None where there is none."""

    def to_csv(self) -> str:
        """The figures, with a line for their names."""
        text = io.StringIO()
        writer = csv.writer(text)  # with another end of lines it would not quote a cell with "\r"
        writer.writerow(map(safe_cell, self.columns))
        for cells in zip(*self.columns.values(), strict=True):
            writer.writerow([safe_cell(cell) if isinstance(cell, str) else cell for cell in cells])
        return text.getvalue()

    def to_latex(self) -> str:
        """The shown cells as a tabular; the first column is aligned left, the others right."""
        lines = [_row(self.header), r"\midrule", *map(_row, self.lines)]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}"
        return "\n".join([begin, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", ""])


def ends(name: str, intervals: Sequence[Interval | None]) -> dict[str, list[float | None]]:
    """The columns of both ends of some intervals."""
    return {
        f"{name}_low": [one.low if one else None for one in intervals],
        f"{name}_high": [one.high if one else None for one in intervals],
    }


def _row(cells: Iterable[str]) -> str:
    return " & ".join("".join(SPECIAL.get(character, character) for character in cell) for cell in cells) + r" \\"


def write_tables(tables: Iterable[Table], page: Path) -> list[Path]:
    """Write each table as CSV and LaTeX beside a page, named after it; returns the paths."""
    written = []
    for table in tables:
        for suffix, text in ((".csv", table.to_csv()), (".tex", table.to_latex())):
            written.append(page.with_name(f"{page.stem}-{table.name}{suffix}"))
            write_text(written[-1], text)
    return written
