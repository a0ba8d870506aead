"""All parts of a report together, as one HTML page and as JSON.

Design: the page has everything in it: styles, plots as SVG, thumbnails as data: URLs, no script. Each part gives its
numbers with its elements, so that the JSON has all that is on the page. It costs a second or two for 9,000 questions
about 975 images, most of it to draw images for intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lookonce.errors import UsageError
from lookonce.files import write_text
from lookonce.page import heading, page
from lookonce.report.answers import answers, errors
from lookonce.report.contexts import contexts
from lookonce.report.provenance import data, provenance, settings
from lookonce.report.runs import DataFacts, Part, ReportedRun, open_runs
from lookonce.report.scores import comparison, groups, metrics, run_sentence, verdict
from lookonce.report.training import cost, curves
from lookonce.run.folder import RunFolder
from lookonce.text import listed
from lookonce.version import __version__

MADE_BY = "Made by lookonce report"
"""What stands at the end of a page."""
MAX_TOLD = 3
"""The top of the page has the scores of this many runs, and the sentences of this many runs or pairs."""


@dataclass(frozen=True)
class Report:
    """The report of some runs."""

    runs: Sequence[ReportedRun]
    parts: Sequence[Part]
    of_what: str = ""
    """What the title names; by default the runs."""

    @classmethod
    def of(cls, runs: Sequence[ReportedRun], *, with_first_only: bool = False) -> Report:
        """Make all parts; with several runs, compare all with all or `with_first_only`.

        Raises:
            UsageError: the runs answered different questions.
        """
        compared = comparison(runs, with_first_only)  # first, because the others take runs to have the same questions
        in_context = [contexts(runs)] if any(run.has_context for run in runs) else []
        makers = (groups, metrics, curves, answers, errors, cost, settings, data, provenance)
        return cls(runs, [verdict(runs), compared, *in_context, *(make(runs) for make in makers)])

    def to_page(self) -> str:
        """The whole page as text."""
        title = f"Report of {self.of_what or listed([run.name for run in self.runs])}"
        top = heading(title, " ".join(self.sentences()[:MAX_TOLD]), self._tiles())
        content = [top, *(element for part in self.parts for element in part.elements())]
        return page(title, content, f"{MADE_BY}, version {__version__}. Its --json has the same numbers.")

    def to_json(self) -> dict[str, Any]:
        """The numbers of all parts, by their keys."""
        return {part.key: part.numbers for part in self.parts}

    def sentences(self) -> list[str]:
        """How the runs compare; without a comparison, how each is scored."""
        compared = next(part.numbers for part in self.parts if part.key == "comparison")
        if not compared:
            return [run_sentence(run) for run in self.runs]
        return [pair["sentence"] for pair in compared.get("token_f1", compared)["pairs"]]

    def _tiles(self) -> Iterable[tuple[str, str]]:
        scored = [(run.name, run.scores) for run in self.runs if run.scores]
        for name, scores in scored[:MAX_TOLD]:
            words = "exact match" if len(scored) == 1 else name
            yield words, f"{scores.overall.exact_match:.1%}"
        if scored:
            scores = scored[0][1]
            yield "majority baseline", f"{scores.overall.majority:.1%}"
            yield "questions", f"{scores.overall.num_questions:,}"
            yield "images", f"{scores.num_images:,}"


def check_replaces_page(path: Path) -> None:
    """Check that nothing but a page of this module would be replaced by one that is written there.

    Raises:
        UsageError: there is something else.
    """
    content = path.read_bytes() if path.is_file() else b""
    is_page = content.startswith(b"<!doctype html>") and MADE_BY.encode() in content
    if path.exists() and not is_page:
        raise UsageError(f"{path} exists and is not a page of lookonce report; name another file with -o, or remove it")


def report_training(folder: RunFolder, summary: dict[str, Any], data: DataFacts) -> Path:
    """Write the report of a training that has just ended, from what it knows, into its run folder; returns the path."""
    runs = [replace(run, known_summary=summary, known_data=data) for run in open_runs([folder.folder])]
    write_text(folder.report, Report.of(runs).to_page())
    return folder.report
