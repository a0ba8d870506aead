"""Whether one run is better than another: the figures and sentences of `lookonce compare`."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from lookonce.eval.comparison.compare import Comparison, Pair, compare
from lookonce.eval.comparison.report import sentence, shown_p, to_json
from lookonce.page import sentences, subsection, table
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
POOR = (
    "Exact match says little about these answers: most references are sentences, or hardly any answer is right. These "
    "are the words that answers have in common with their references."
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
    numbers, content = to_json(found), _compared(found)
    if found.is_exact_match_poor:
        in_words = compare(answers, with_first_only=with_first_only, metric="token_f1")
        numbers["token_f1"] = to_json(in_words)
        content += subsection("F1 of words", POOR, *_compared(in_words))
    return Part("comparison", TITLE, NOTE, numbers, content)


def _compared(found: Comparison) -> list[Element]:
    """Sentences and figures of the pairs."""
    said = [sentence(pair, found.num_questions) for pair in found.pairs]
    return [sentences(said), table(HEADER, [_line(pair) for pair in found.pairs]), *_candidates(found)]


def _line(pair: Pair) -> list[str]:
    counts = [pair.only_first, pair.only_second]
    return [
        f"{pair.second} against {pair.first}",
        f"{100 * pair.difference:+.1f}",
        in_percent(pair.interval),
        shown_p(pair.p_holm),
        *("" if number is None else f"{number:,}" for number in counts),
        "" if pair.p_mcnemar is None else shown_p(pair.p_mcnemar),
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
            f"{one.score:.1%}",
            in_percent(one.interval),
            "" if one.spread is None else f"{100 * one.spread:.1f}",
        )
        for one in found.candidates
    ]
    return [table(("runs with other seeds", "seeds", "mean", "95% interval", "seeds differ by"), lines)]
