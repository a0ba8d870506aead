"""Whether one run is better than another: the figures and sentences of `lookonce compare`."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from lookonce.eval.comparison.compare import Comparison, Pair, compare
from lookonce.eval.comparison.report import sentence, to_json
from lookonce.page.markup import table
from lookonce.page.sections import sentences
from lookonce.report.part import Part
from lookonce.report.runs import ReportedRun
from lookonce.report.sections.verdict import in_percent

TITLE = "Comparison"
HEADER = ("pair", "points", "95% interval", "p (Holm)", "only first right", "only second right", "McNemar p", "seeds")
NOTE = (
    "Points: the second less the first. Intervals and p draw images with all their questions, and p is corrected for "
    "the number of pairs. McNemar's p takes the questions of one image as independent. Seeds: how far seeds of one "
    "training are apart."
)


def comparison(runs: Sequence[ReportedRun], with_first_only: bool) -> Part:
    """All pairs, or those with the first run.

    Raises:
        UsageError: the runs answered different questions.
    """
    answers = [run.answers for run in runs if run.answers]
    if len(answers) < 2:
        return Part("comparison", TITLE, "Comparing needs two runs with answers: lookonce report RUN RUN")
    found = compare(answers, with_first_only=with_first_only)
    said = [sentence(pair, found.num_questions) for pair in found.pairs]
    lines = [_line(pair) for pair in found.pairs]
    return Part("comparison", TITLE, NOTE, to_json(found), [sentences(said), table(HEADER, lines), *_candidates(found)])


def _line(pair: Pair) -> list[str]:
    counts = [pair.only_first, pair.only_second]
    return [
        f"{pair.second} against {pair.first}",
        f"{100 * pair.difference:+.1f}",
        in_percent(pair.interval),
        f"{pair.p_holm:.4f}",
        *("" if number is None else f"{number:,}" for number in counts),
        "" if pair.p_mcnemar is None else f"{pair.p_mcnemar:.2g}",
        "" if pair.spread is None else f"{100 * pair.spread:.1f}",
    ]


def _candidates(found: Comparison) -> list[Element]:
    """A table of the candidates, if some are several runs."""
    if all(one.spread is None for one in found.candidates):
        return []
    lines = [
        (
            one.name,
            ", ".join(map(str, one.seeds)),
            f"{one.exact_match:.1%}",
            in_percent(one.interval),
            "" if one.spread is None else f"{100 * one.spread:.1f}",
        )
        for one in found.candidates
    ]
    return [table(("runs with other seeds", "seeds", "mean", "95% interval", "seeds differ by"), lines)]
