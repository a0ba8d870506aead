"""The headline in words: exact match with its interval, and how much higher it is than each baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lookonce.eval.comparison.report import FEW_IMAGES
from lookonce.eval.scores.headline import NAMES
from lookonce.eval.statistics.intervals import Interval
from lookonce.page import sentences, table
from lookonce.report.part import Part, merged
from lookonce.report.runs import ReportedRun
from lookonce.text import count

TEXT = (
    "Exact match: the answer equals the reference, apart from spaces around it. Majority: always the question's most "
    "frequent training answer, without an image."
)
BLIND = ("shuffled", "blank")
"""Baselines that a model reaches without seeing the image of the question."""


def verdict(runs: Sequence[ReportedRun]) -> Part:
    """The runs and their baselines, and sentences on each."""
    header = ("run", "exact match", "95% interval", "baseline", "its exact match", "run is higher by", "95% interval")
    lines = [line for run in runs for line in _lines(run)]
    looks = merged(((run.name, _looks(run)) for run in runs if run.scores), len(runs))
    content = [table(header, lines), sentences([*map(sentence, runs), *looks])]
    return Part("verdict", "Exact match", TEXT, {"runs": [_numbers(run) for run in runs]}, content)


def sentence(run: ReportedRun) -> str:
    """How a run is scored, or why it is not."""
    if run.scores is None:
        training = f"; its training: {run.training.text()}" if run.training else ""
        return f"{run.name} is not evaluated on {run.split}{training}."
    overall, majority = run.scores.overall, run.metrics["baselines"]["majority"]
    asked = f"{count(overall.num_questions, 'question')} about {count(run.scores.num_images, 'image')}"
    right = f"{run.name} answers {overall.exact_match:.1%} of {asked} exactly right"
    if overall.interval is None or majority["interval"] is None:
        return f"{right}; {FEW_IMAGES}. The majority answers reach {overall.majority:.1%}."
    compared = _compared(100 * majority["difference"], Interval(*majority["interval"]))
    interval = f"(95% interval {overall.interval.in_percent()})"
    return f"{right} {interval}. That is {compared} always the majority answer ({overall.majority:.1%})."


def _compared(points: float, interval: Interval) -> str:
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


def _lines(run: ReportedRun) -> list[list[str]]:
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


def _numbers(run: ReportedRun) -> dict[str, Any]:
    value: dict[str, Any] = {"name": run.name, "split": run.split, "sentence": sentence(run)}
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
