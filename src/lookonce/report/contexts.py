"""Exact match with predicted, reference and no answers to earlier questions in the prompts, of all and by stage.

Predicted answers are the model's own; reference answers are its upper limit, and none show what the questions alone are
worth (`lookonce eval --reference-context --no-context`). Seeds of one training count as one: a score is the mean over
the seeds that have it, a difference over those that have both, in pairs. Answers to other questions than those of the
result, which an earlier evaluation may have left, count as absent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lookonce.datasets.curriculum import as_text
from lookonce.errors import UsageError
from lookonce.eval.join import Run, in_one_order
from lookonce.eval.scores.metrics import IN_CONTEXT
from lookonce.eval.scores.prediction import GROUPINGS, Prediction, read_predictions
from lookonce.eval.statistics import Clusters, Interval, clusters_of, difference_interval, share_interval
from lookonce.report.runs import ReportedRun
from lookonce.run.config import RunFile
from lookonce.text import shell, table

KINDS = ("predicted", *IN_CONTEXT)
"""Whose answers to earlier questions prompts have: the model's own (predicted), true ones (reference), or none."""
OPTIONS = {"reference": "--reference-context", "none": "--no-context"}
"""The options of `lookonce eval` that put other answers than the run's own into the prompts."""
PAIRS = {"predicted - none": ("predicted", "none"), "reference - predicted": ("reference", "predicted")}
ALL = "all"
Right = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A share of right answers, or a difference of two."""

    value: float
    interval: Interval | None
    """None if there are too few images."""


@dataclass(frozen=True)
class ContextScores:
    """What one training scores, with all its seeds."""

    name: str
    num_seeds: int
    num_questions: dict[str, int]
    """How many questions there are, in all and of each stage; the keys of all estimates."""
    exact_match: dict[str, dict[str, Estimate]]
    """By whose answers the prompts have; what was not asked is absent."""
    differences: dict[str, dict[str, Estimate]]
    """The differences between predicted and none, and between reference and predicted."""
    not_asked: list[str]

    @property
    def title(self) -> str:
        return f"{self.name} ({self.num_seeds} seeds)" if self.num_seeds > 1 else self.name


def other_contexts(run: RunFile) -> list[str]:
    """With whose answers a run can be asked beside its own evaluation: of those with `data.context` and questions."""
    has_both = run.data.context and getattr(run.data, run.eval.split)
    return [kind for kind in IN_CONTEXT if has_both and kind != run.eval.staged]


def context_scores(runs: Sequence[ReportedRun]) -> list[ContextScores]:
    """The scores of runs with `data.context`; raises UsageError if seeds answered different questions."""
    trainings: dict[str, list[ReportedRun]] = {}
    for run in runs:
        if run.has_context and run.answers:
            trainings.setdefault(run.answers.training or run.name, []).append(run)
    return [_scores(seeds) for seeds in trainings.values()]


def _scores(seeds: Sequence[ReportedRun]) -> ContextScores:
    answers = [_answers(run) for run in seeds]
    flat = [(kind, seed, run) for seed, by_kind in enumerate(answers) for kind, run in by_kind.items()]
    rows = in_one_order([run for _, _, run in flat])
    right = {kind: dict[int, Right]() for kind in KINDS}  # by seed
    for (kind, seed, _), answered in zip(flat, rows, strict=True):
        right[kind][seed] = np.array([prediction.is_right for prediction in answered], dtype=np.float64)
    shares = {kind: np.mean([*by_seed.values()], axis=0) for kind, by_seed in right.items() if by_seed}
    pairs = {
        name: np.mean([right[first][seed] - right[second][seed] for seed in both], axis=0)
        for name, (first, second) in PAIRS.items()
        if (both := right[first].keys() & right[second].keys())
    }
    groups, clusters = _groups(seeds[0], rows[0]), clusters_of([prediction.sources for prediction in rows[0]])

    def estimates(values_Q: Right, interval: Callable[[Right, Clusters], Interval | None]) -> dict[str, Estimate]:
        return {
            group: Estimate(float(values_Q[is_in_Q].mean()), interval(values_Q[is_in_Q], clusters[is_in_Q]))
            for group, is_in_Q in groups.items()
        }

    return ContextScores(
        flat[0][2].name,
        len(seeds),
        {name: int(is_in_Q.sum()) for name, is_in_Q in groups.items()},
        {kind: estimates(right_Q, share_interval) for kind, right_Q in shares.items()},
        {name: estimates(difference_Q, difference_interval) for name, difference_Q in pairs.items()},
        [line for run, by_kind in zip(seeds, answers, strict=True) if (line := _command(run, by_kind))],
    )


def _answers(run: ReportedRun) -> dict[str, Run]:
    """The answers of a run, by whose answers its prompts have; its result first."""
    assert run.answers and run.settings, "only runs with answers and settings are shown"
    whose = {prediction.context_answers or "reference" for prediction in run.answers.predictions if prediction.context}
    by_kind: dict[str, Run] = {whose.pop() if whose else run.settings.eval.staged: run.answers}
    for kind in IN_CONTEXT:
        path = run.folder.predictions(f"{run.split}-{kind}") if run.folder else None
        if path and path.exists() and kind not in by_kind:
            beside = replace(run.answers, predictions=read_predictions(path))
            with contextlib.suppress(UsageError):  # they are to other questions
                in_one_order([run.answers, beside])
                by_kind[kind] = beside
    return by_kind


def _groups(run: ReportedRun, rows: Sequence[Prediction]) -> dict[str, NDArray[np.bool_]]:
    """Which questions are in each group: all, then those of each stage."""
    assert run.settings and run.settings.data.context
    form, groups = run.settings.data.context, {ALL: np.ones(len(rows), dtype=np.bool_)}
    if form.by in GROUPINGS:
        for value in map(as_text, form.order):
            groups[f"{form.by} {value}"] = np.array([getattr(row.in_nfc, form.by) == value for row in rows])
    return {name: is_in_Q for name, is_in_Q in groups.items() if is_in_Q.any()}


def _command(run: ReportedRun, answers: Mapping[str, Run]) -> str:
    """The command that asks a run what is absent; empty if nothing is."""
    options = [option for kind, option in OPTIONS.items() if kind not in answers]
    if not options or run.folder is None:
        return ""
    return shell("lookonce", "eval", run.folder.folder, "--split", run.split, *options)


HEADER = ("questions", *KINDS, *PAIRS)

Cell = tuple[str, str]
"""A figure and its interval, as they are shown."""


def context_cells(scores: ContextScores) -> dict[str, list[Cell]]:
    """The cells of a table below `HEADER`, by the questions of a line: all, then each stage."""
    return {
        group: [
            *(_share(scores.exact_match.get(kind, {}).get(group)) for kind in KINDS),
            *(_points(scores.differences.get(name, {}).get(group)) for name in PAIRS),
        ]
        for group in scores.num_questions
    }


def _share(estimate: Estimate | None) -> Cell:
    return (f"{estimate.value:.1%}", _interval(estimate)) if estimate else ("not evaluated", "")


def _points(estimate: Estimate | None) -> Cell:
    return (f"{100 * estimate.value:+.1f}", _interval(estimate)) if estimate else ("", "")


def _interval(estimate: Estimate) -> str:
    return estimate.interval.in_percent() if estimate.interval else "no interval"


def context_text(scores: ContextScores) -> str:
    """The scores as a text of 80 columns, where only differences have intervals; and the commands that ask the rest."""
    lines = [
        [group, *(words for words, _ in cells[: len(KINDS)]), *map(with_interval, cells[len(KINDS) :])]
        for group, cells in context_cells(scores).items()
    ]
    missing = [f"not evaluated yet; run: {line}" for line in scores.not_asked]
    title = f"{scores.title} with predicted, reference and no earlier answers in the prompts"
    header = ("", *HEADER[1 : len(KINDS) + 1], "pred. - none", "ref. - pred.")
    return "\n".join([title, table(header, lines), *missing])


def with_interval(cell: Cell) -> str:
    words, interval = cell
    return f"{words} [{interval}]" if interval else words
