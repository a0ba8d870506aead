"""The losses and the learning rate of each training, and exact match over steps: while training, and after it.

Design: while training, exact match is measured on some validation questions; after it, on the evaluated split. The two
are not comparable, so they have a panel each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from lookonce.eval.scores.metrics import read_metrics
from lookonce.page import key
from lookonce.plots import Line, Panel, line_plot, node
from lookonce.report.part import Part
from lookonce.report.runs import ReportedRun
from lookonce.run.folder import RunFolder
from lookonce.run.log_file import Curve, Curves, smoothed

TITLE = "Curves"
NUM_COLOURS = 6
"""The page's style sheet has this many colours for lines; more runs are not drawn."""


def curves(runs: Sequence[ReportedRun]) -> Part:
    """One plot with all runs that have a log."""
    drawn = [(run, _finite(run.curves)) for run in runs]
    drawn = [(run, found) for run, found in drawn if found.loss or found.validation_loss]
    if not drawn:
        return Part("curves", TITLE, "No training has logged a loss.")
    text = " ".join([_text(len(drawn)), *(sentence for run, found in drawn for sentence in _best(run, found))])
    drawn = drawn[:NUM_COLOURS]
    names = [run.name for run, _ in drawn]
    plot = line_plot("", "step", [*_losses([found for _, found in drawn]), *_scores(drawn)])
    plot.set("aria-label", f"curves of {', '.join(names)}")
    content = [key(names, "main"), node("figure", plot, class_="curves")]
    return Part("curves", TITLE, text, {run.name: _numbers(run, found) for run, found in drawn}, content)


def _text(number: int) -> str:
    faint = " faint: each logged value;" if number == 1 else ""
    first = f" The first {NUM_COLOURS} runs." if number > NUM_COLOURS else ""
    return f"Lines: the mean training loss over a 25th of the log;{faint} circles: validation loss.{first}"


def _best(run: ReportedRun, found: Curves) -> Iterator[str]:
    """The best of the measurements while training."""
    if found.best:
        yield f"{run.name}: lowest validation loss {found.best[1]:.4f} at step {found.best[0]:,}."
    if found.most_right:
        step, share = found.most_right
        yield f"{run.name}: highest exact match while training {share:.1%} at step {step:,}."


def _finite(found: Curves) -> Curves:
    """The curves without values that are not finite, which have no place in a plot."""
    drawn = (found.loss, found.validation_loss, found.learning_rate, found.exact_match)
    return Curves(*map(_only_finite, drawn))


def _only_finite(curve: Curve) -> Curve:
    return {step: value for step, value in curve.items() if isinstance(value, int | float) and math.isfinite(value)}


def _losses(found: Sequence[Curves]) -> list[Panel]:
    """The losses of all runs, and below them the learning rates."""
    lines = [
        line for number, one in enumerate(found, start=1) for line in _lines(one, number, is_alone=len(found) == 1)
    ]
    lows, highs = zip(*(one.loss_range() for one in found), strict=True)
    rates = [Line("", list(one.learning_rate.items()), "main", number) for number, one in enumerate(found, start=1)]
    highest = max((rate for one in found for rate in one.learning_rate.values()), default=0.0) or 1.0
    return [Panel("loss", lines, min(lows), max(highs), 400), Panel("learning rate", rates, 0.0, highest, 90)]


def _lines(found: Curves, colour: int, *, is_alone: bool) -> list[Line]:
    faint = [Line("", list(found.loss.items()), "faint", colour)] if is_alone else []
    validation = [Line("", list(found.validation_loss.items()), "marked", colour)] if found.validation_loss else []
    return [*faint, Line("", list(smoothed(found.loss).items()), "main", colour), *validation]


def _scores(drawn: Sequence[tuple[ReportedRun, Curves]]) -> list[Panel]:
    """Exact match while training, and after shorter trainings and the last; nothing if no run has two of them."""
    return [
        *_shares("exact match while training", [found.exact_match for _, found in drawn]),
        *_shares("exact match", [measured(run) for run, _ in drawn]),
    ]


def _shares(name: str, found: Sequence[Curve]) -> list[Panel]:
    points = [list(curve.items()) for curve in found]
    lines = [Line("", some, "marked", number) for number, some in enumerate(points, start=1) if len(some) > 1]
    return [Panel(name, lines, 0.0, 1.0, 150)] if lines else []


def measured(run: ReportedRun) -> dict[int, float]:
    """The exact match after some steps, of the training before it was extended and of the last one."""
    if run.folder is None:
        return {}
    found = {}
    for folder in (*run.folder.folder.glob("steps-*"), run.folder.folder):
        results = RunFolder(folder)
        if results.trained.exists() and (metrics := read_metrics(results, run.split)):
            found[results.read_trained().num_steps] = metrics["overall"]["exact_match"]
    return dict(sorted(found.items()))


def _numbers(run: ReportedRun, found: Curves) -> dict[str, Any]:
    names = ("loss", "validation_loss", "learning_rate")
    during = {"exact_match_while_training": found.exact_match, "most_right": found.most_right}
    return {name: getattr(found, name) for name in names} | {"best": found.best, "exact_match": measured(run)} | during
