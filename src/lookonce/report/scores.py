"""The parts of a report on scores: the headline in words, each pair of runs, exact match by group, other metrics.

verdict     exact match with its interval, and how much higher it is than each baseline
comparison  each pair of runs: whether the difference is more than chance, as in `lookonce compare`
groups      exact match by question, category, source and stage, sorted by the gain over the majority baseline
metrics     all other metrics beside the majority answers, and what is wrong in kind
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.eval.compare import FEW_IMAGES, Comparison, Pair, compare, sentence, shown_p, to_json
from lookonce.eval.scores.metrics import NAMES, Figure
from lookonce.eval.scores.prediction import GROUPINGS
from lookonce.eval.statistics import Interval
from lookonce.page import sentences, subsection, table
from lookonce.plots import Content, share_cell
from lookonce.report.runs import Part, ReportedRun, Scored, merged, words
from lookonce.text import count

VERDICT_TEXT = (
    "Exact match: the answer equals the reference, apart from spaces around it. Majority: always the question's most "
    "frequent training answer, without an image."
)
BLIND = ("shuffled", "blank")
"""Baselines that a model reaches without seeing the image of the question."""


def verdict(runs: Sequence[ReportedRun]) -> Part:
    """The runs and their baselines, and sentences on each."""
    header = ("run", "exact match", "95% interval", "baseline", "its exact match", "run is higher by", "95% interval")
    lines = [line for run in runs for line in _baseline_lines(run)]
    looks = merged(((run.name, _looks(run)) for run in runs if run.scores), len(runs))
    content = [table(header, lines), sentences([*map(run_sentence, runs), *looks])]
    return Part("verdict", "Exact match", VERDICT_TEXT, {"runs": [_verdict_numbers(run) for run in runs]}, content)


def run_sentence(run: ReportedRun) -> str:
    """How a run is scored, or why it is not."""
    if run.scores is None:
        training = f"; its training: {run.training.text()}" if run.training else ""
        return f"{run.name} is not evaluated on {run.split}{training}."
    overall, majority = run.scores.overall, run.metrics["baselines"]["majority"]
    asked = f"{count(overall.num_questions, 'question')} about {count(run.scores.num_images, 'image')}"
    right = f"{run.name} answers {overall.exact_match:.1%} of {asked} exactly right"
    if overall.interval is None or majority["interval"] is None:
        return f"{right}; {FEW_IMAGES}. The majority answers reach {overall.majority:.1%}."
    compared = _beside_majority(100 * majority["difference"], Interval(*majority["interval"]))
    interval = f"(95% interval {overall.interval.in_percent()})"
    return f"{right} {interval}. That is {compared} always the majority answer ({overall.majority:.1%})."


def _beside_majority(points: float, interval: Interval) -> str:
    if interval.low > 0:
        return f"{points:.1f} points more than"
    return f"{-points:.1f} points less than" if interval.high < 0 else "not distinguishable from"


def _looks(run: ReportedRun) -> str:
    """Whether the model looks at the image, by what it scores without the right one."""
    known = {key: one for key, one in run.metrics["baselines"].items() if key in BLIND}
    if not known:
        return "whether the model looks at the image is not known; to measure it: lookonce eval RUN --baselines"
    scores = " and ".join(f"{one['exact_match']:.1%} with {NAMES[key]}" for key, one in known.items())
    if all(one["interval"] and one["interval"][0] > 0 for one in known.values()):
        return f"the model scores {scores}, so it looks at the image"
    return f"the model scores {scores}, so nothing shows that it looks at the image"


def _baseline_lines(run: ReportedRun) -> list[list[str]]:
    """A line for each baseline."""
    if run.scores is None:
        return [[run.name, "not evaluated", "", "", "", "", ""]]
    mine = [f"{run.scores.overall.exact_match:.1%}", in_percent(run.scores.overall.interval)]
    return [
        [
            run.name,
            *mine,
            NAMES.get(key, key),
            f"{one['exact_match']:.1%}",
            f"{100 * one['difference']:+.1f}",
            in_percent(Interval(*one["interval"]) if one["interval"] else None),
        ]
        for key, one in run.metrics["baselines"].items()
    ]


def in_percent(interval: Interval | None) -> str:
    return "none" if interval is None else interval.in_percent()


def _verdict_numbers(run: ReportedRun) -> dict[str, Any]:
    value: dict[str, Any] = {"name": run.name, "split": run.split, "sentence": run_sentence(run)}
    if run.scores is None:
        return value
    overall = run.scores.overall
    return value | {
        "num_questions": overall.num_questions,
        "num_images": run.scores.num_images,
        "exact_match": overall.exact_match,
        "interval": overall.interval,
        "majority": overall.majority,
        "baselines": run.metrics["baselines"],
    }


COMPARISON = "Comparison"
PAIR_HEADER = (
    "pair",
    "points",
    "95% interval",
    "p (Holm)",
    "only first right",
    "only second right",
    "McNemar p",
    "seeds",
)
COMPARISON_NOTE = (
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
        return Part("comparison", COMPARISON, "Comparing needs two runs with answers: lookonce report RUN RUN")
    found = compare(answers, with_first_only=with_first_only)
    numbers, content = to_json(found), _pairs(found)
    if found.is_exact_match_poor:
        in_words = compare(answers, with_first_only=with_first_only, metric="token_f1")
        numbers["token_f1"] = to_json(in_words)
        content += subsection("F1 of words", POOR, *_pairs(in_words))
    return Part("comparison", COMPARISON, COMPARISON_NOTE, numbers, content)


def _pairs(found: Comparison) -> list[Element]:
    """Sentences and figures of the pairs."""
    said = [sentence(pair, found.num_questions) for pair in found.pairs]
    return [sentences(said), table(PAIR_HEADER, [_pair_line(pair) for pair in found.pairs]), *_candidates(found)]


def _pair_line(pair: Pair) -> list[str]:
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


GROUPS = "Exact match by group"
GROUPS_TEXT = (
    "Sorted by what the model scores above the majority answers (gain, in points). In the plots, from 0 to 100 %, a "
    "dot is the score, the line around it its 95% interval, and the vertical mark the majority baseline."
)


def groups(runs: Sequence[ReportedRun]) -> Part:
    """A table for each grouping that the records have."""
    scored = [run for run in runs if run.scores]
    tables = [element for by in GROUPINGS for element in _grouping(by, scored)]
    if not tables:
        return Part("groups", GROUPS, "Nothing is evaluated yet.")
    return Part("groups", GROUPS, GROUPS_TEXT, {run.name: _group_numbers(run) for run in scored}, tables)


def _grouping(by: str, runs: Sequence[ReportedRun]) -> list[Element]:
    first = _scored_by(runs[0], by) if runs else {}
    if not first:
        return []
    names = sorted(first, key=lambda name: -first[name].gain)
    others = _conditions(runs)
    header = [by, "asked", *(run.name for run in runs), "majority", "gain"]
    header += [f"{NAMES[key]}, {run.name}" if len(runs) > 1 else NAMES[key] for run, key in others]
    lines = [
        [
            *_group_line(name, [_scored_by(run, by).get(name) for run in runs]),
            *("" if (score := _under(run, key, by, name)) is None else f"{score:.1%}" for run, key in others),
        ]
        for name in names
    ]
    more = max(run.scores.num_groups[by] for run in runs if run.scores) - len(names)
    text = f"The {len(names):,} with most questions; {count(more, 'other')}." if more > 0 else ""
    return subsection(f"By {by}", text, table(header, lines))


def _scored_by(run: ReportedRun, by: str) -> dict[str, Scored]:
    return run.scores.groups[by] if run.scores else {}


def _group_line(name: str, scored: Sequence[Scored | None]) -> list[Content]:
    first = scored[0]
    assert first is not None  # the names are those of the first run
    cells = [_score_cell(one) if one else "" for one in scored]
    return [
        words(name),
        f"{first.num_questions:,}",
        *cells,
        f"{first.majority:.1%}",
        f"{100 * first.gain:+.1f}",
    ]


def _score_cell(one: Scored) -> Element:
    interval = one.interval.in_percent() if one.interval else "no interval"
    return share_cell(f"{one.exact_match:.1%}", interval, one.exact_match, one.interval, one.majority)


def _group_numbers(run: ReportedRun) -> dict[str, Any]:
    numbers: dict[str, Any] = {"num_groups": run.scores.num_groups if run.scores else {}}
    for by in GROUPINGS:
        numbers[f"by_{by}"] = {
            name: asdict(one)
            | {"gain": one.gain, "baselines": {key: _under(run, key, by, name) for key in run.conditions}}
            for name, one in _scored_by(run, by).items()
        }
    return numbers


def _under(run: ReportedRun, other: str, by: str, name: str) -> float | None:
    """The exact match of a group by a baseline; None if it is not known."""
    found = run.conditions[other].get(f"by_{by}", {}).get(name)
    return found["exact_match"] if found else None


METRICS = "Other metrics"
DISTANCES = ("point_distance", "point_distance_median")
"""Figures that are not shares but in the units of the answers."""

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
        return Part("metrics", METRICS, "Nothing is evaluated yet.")
    keys = dict.fromkeys(key for run in scored for key in run.metrics["metrics"])
    others = [f"{NAMES[key]}, {run.name}" if len(runs) > 1 else NAMES[key] for run, key in _conditions(scored)]
    header = ("metric", "asked", *(run.name for run in scored), "majority", *others, "at most")
    numbers = {run.name: {name: run.metrics.get(name) for name in ("metrics", "counts")} for run in scored}
    tables = [table(header, [_metric_line(key, scored) for key in keys])]
    tables.append(table(("answers", *(run.name for run in scored)), _counts(scored)))
    return Part("metrics", METRICS, _metrics_text(scored), numbers, tables)


def _metrics_text(runs: Sequence[ReportedRun]) -> str:
    missing = next((run.metrics["text_metrics"] for run in runs if "pip install" in run.metrics["text_metrics"]), "")
    start = "Shares of the questions to which a metric applies; at most: what the references themselves score."
    return f"{start} BLEU, ROUGE, METEOR and chrF are {missing}." if missing else start


def _metric_line(key: str, runs: Sequence[ReportedRun]) -> list[str]:
    """Name, questions, each run, the majority answers, what other baselines score, the highest value."""
    values = [run.metrics["metrics"].get(key) for run in runs]
    found = [Figure(**value, is_share=key not in DISTANCES) if value else None for value in values]
    conditions = [run.conditions[other].get("metrics", {}).get(key) for run, other in _conditions(runs)]
    beside = [one and one["model"] for one in conditions]
    name, asked, _, *others = next(one.line(beside) for one in found if one)
    return [name, asked, *(one.line()[2] if one else "" for one in found), *others]


def _conditions(runs: Sequence[ReportedRun]) -> list[tuple[ReportedRun, str]]:
    """The baselines that a model has answered, of each run."""
    return [(run, key) for run in runs for key in run.conditions]


def _counts(runs: Sequence[ReportedRun]) -> list[list[str]]:
    known = [(words, [run.metrics["counts"].get(key) for run in runs]) for key, words in COUNTS.items()]
    return [
        [words, *("" if number is None else f"{number:,}" for number in numbers)]
        for words, numbers in known
        if any(number is not None for number in numbers)
    ]
