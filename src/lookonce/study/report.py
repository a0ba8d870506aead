"""`lookonce study report`: the arms compared, by `lookonce compare` and on the page of `lookonce report`.

Design: runs of one arm are seeds of one another as the study has them, whatever their records are: a share of the
records that is drawn by the seed is another one for each. Runs that are not complete are left out, and named.

A run's own majority answers are those of the records that it is trained on. An arm with a part of the records, such as
the last phase of a chain, would be compared with the majority of that part, which answers the other stages badly. So
the rows get the majority of all training records of the base run, the same for every arm, and the scores beside them
follow. The run folders stay as they are.

A learning curve is that of an arm with all phases of its chain, one behind another, since it costs what they cost.
Values are means over the seeds, at the steps that all of them have. Minutes are those of training, from the times in
the log; a training that was resumed has none. There are few colours, so there may be several figures, with the first
arm in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any, Literal
from xml.etree.ElementTree import Element

from lookonce.datasets.majority import Majority
from lookonce.errors import LookonceError, UsageError
from lookonce.eval.compare import WIDTH, Comparison, compare, to_json, to_text
from lookonce.eval.join import Run
from lookonce.eval.scores.metrics import Headline
from lookonce.eval.scores.prediction import read_predictions
from lookonce.files import write_text
from lookonce.page import key
from lookonce.plots import Line, Panel, line_plot, node
from lookonce.report.contexts import ContextScores, context_scores
from lookonce.report.report import Report
from lookonce.report.runs import Part, ReportedRun, open_runs
from lookonce.report.training import NUM_COLOURS
from lookonce.run.config import read_run_file
from lookonce.run.folder import TrainedElsewhere
from lookonce.run.log_file import read_lines
from lookonce.run.records import read_splits
from lookonce.study.figures import (
    ArmFigures,
    Forgetting,
    Table,
    arms_part,
    arms_table,
    context_table,
    context_text,
    figures,
    find_forgetting,
    forgetting_part,
    write_tables,
)
from lookonce.study.file import StudyFile, read_study
from lookonce.study.state import RoutedRun, StudyStatus
from lookonce.text import first_line, listed, shell, table

MAJORITY_NOTE = "The majority answers are those of all training records of the base run, for every arm."
CURVES_TITLE = "Learning curves"
CURVES_NOTE = (
    "Means over the seeds. A chain is drawn with all its phases, each behind the one before; a new phase has another "
    "loss at once."
)
NO_CURVES = "No run has a validation loss."
METRICS = {"validation_loss": "eval_loss", "exact_match": "eval_exact_match"}
"""The log's names of what is drawn."""
NAMES = {"validation_loss": "validation loss", "exact_match": "exact match while training"}
Axis = Literal["samples", "minutes"]


@dataclass(frozen=True)
class Measured:
    """What was measured while training, after this many samples."""

    samples: float
    minutes: float | None
    """None if a training was resumed, which may have waited in between."""
    validation_loss: float | None
    exact_match: float | None


@dataclass(frozen=True)
class ArmCurve:
    """What was measured of an arm and of the phases before it, in order."""

    arm: str
    phases: list[str]
    points: list[Measured]

    def line(self, metric: str, axis: Axis, colour: int) -> Line:
        points = [(getattr(one, axis), getattr(one, metric)) for one in self.points]
        return Line("", [point for point in points if None not in point], "marked", colour)


def learning_curves(study: StudyFile, arms: Sequence[str], runs: Mapping[str, ReportedRun]) -> list[ArmCurve]:
    """The curves of those arms that are trained; `runs` are the complete ones, by name."""
    found = []
    for arm in (arm for arm in arms if arm in study.trained):
        phases = _phases(arm, study)
        seeds = [seed for seed in study.seeds if all(f"{phase}-{seed}" in runs for phase in phases)]
        points = _joined([_mean([_measured(runs[f"{phase}-{seed}"]) for seed in seeds]) for phase in phases])
        if points:
            found.append(ArmCurve(arm, phases, points))
    return found


def _phases(arm: str, study: StudyFile) -> list[str]:
    before = study.arms[arm].starts_from
    return [*(_phases(before, study) if before else []), arm]


def _measured(run: ReportedRun) -> dict[int, Measured]:
    """What a run has logged, by step, and at its last step where the next phase begins."""
    if run.folder is None or isinstance(trained := run.folder.read_trained(), TrainedElsewhere):
        return {}
    lines = list(read_lines(run.folder.log))
    end = lines[-1].get("time") if lines and not trained.first_step else None
    found: dict[int, Measured] = {}
    for line in lines:
        values = {metric: line.get(name) for metric, name in METRICS.items()}
        if any(value is not None for value in values.values()):
            seconds = trained.seconds - (end - line["time"]) if end and "time" in line else None
            samples = trained.num_samples * line["step"] / max(trained.num_steps, 1)
            found[line["step"]] = Measured(samples, None if seconds is None else max(seconds, 0) / 60, **values)
    return found


def _mean(seeds: Sequence[Mapping[int, Measured]]) -> list[Measured]:
    """The means over seeds, at the steps that all have."""
    steps = sorted(set(seeds[0]).intersection(*seeds[1:])) if seeds else []
    found = []
    for step in steps:
        some = [one[step] for one in seeds]
        found.append(
            Measured(
                fmean(one.samples for one in some),
                _mean_of([one.minutes for one in some]),
                _mean_of([one.validation_loss for one in some]),
                _mean_of([one.exact_match for one in some]),
            )
        )
    return found


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _joined(phases: Sequence[Sequence[Measured]]) -> list[Measured]:
    """The points of phases, each behind the last one of the phase before; none if a phase has none."""
    found: list[Measured] = []
    samples: float = 0
    minutes: float | None = 0
    for phase in phases:
        if not phase:
            return []
        found += [
            Measured(
                samples + one.samples,
                None if one.minutes is None or minutes is None else minutes + one.minutes,
                one.validation_loss,
                one.exact_match,
            )
            for one in phase
        ]
        samples, minutes = found[-1].samples, found[-1].minutes
    return found


def curves_part(found: Sequence[ArmCurve]) -> Part:
    """The curves as a part of the page."""
    if not found:
        return Part("learning_curves", CURVES_TITLE, NO_CURVES)
    content = [element for some in _figures(found) for element in some]
    return Part("learning_curves", CURVES_TITLE, CURVES_NOTE, [asdict(one) for one in found], content)


def _figures(found: Sequence[ArmCurve]) -> list[list[Element]]:
    """Two plots for the first arm and as many others as there are colours."""
    first, *others = found
    size = NUM_COLOURS - 1
    groups = [[first, *others[start : start + size]] for start in range(0, max(len(others), 1), size)]
    return [[key([one.arm for one in group], "marked"), *_plots(group)] for group in groups]


def _plots(group: Sequence[ArmCurve]) -> list[Element]:
    plots = []
    axes: dict[Axis, str] = {"samples": "samples", "minutes": "minutes of training"}
    for axis, name in axes.items():
        panels = [panel for metric in METRICS if (panel := _panel(group, metric, axis))]
        if panels:
            plot = line_plot("", name, panels)
            plot.set("aria-label", f"{', '.join(one.arm for one in group)} over {name}")
            plots.append(node("figure", plot, class_="curves"))
    return plots


def _panel(group: Sequence[ArmCurve], metric: str, axis: Axis) -> Panel | None:
    lines = [one.line(metric, axis, number) for number, one in enumerate(group, start=1)]
    values = [value for line in lines for _, value in line.points]
    if not values:
        return None
    low, high = (0.0, 1.0) if metric == "exact_match" else (min(values), max(values))
    return Panel(NAMES[metric], lines, low, high, 260)


def with_base_majority(study: StudyFile, runs: Mapping[str, ReportedRun]) -> tuple[Mapping[str, ReportedRun], str]:
    """The runs with the majority answers of the base run, and a note on whose they are.

    If the records cannot be read any more, the runs keep theirs, and the note says why.
    """
    try:
        majority = Majority.of_records(read_splits(read_run_file(study.base))["train"])
    except LookonceError as error:
        why = f"those of the base run cannot be read: {first_line(error)}"
        return runs, f"The majority answers are those of each run's own training records, because {why}"
    return {name: _with(majority, run) for name, run in runs.items()}, MAJORITY_NOTE


def _with(majority: Majority, run: ReportedRun) -> ReportedRun:
    if run.answers is None:
        return run
    rows = [replace(row, majority=majority.answer(row.question)) for row in run.answers.predictions]
    if rows == run.answers.predictions:
        return run
    baselines = run.metrics["baselines"] | {"majority": asdict(Headline.of(rows, {}).baselines["majority"])}
    metrics = run.metrics | {"baselines": baselines}
    return replace(run, answers=replace(run.answers, predictions=rows), known_metrics=metrics)


@dataclass(frozen=True)
class StudyReport:
    """The comparison of a study's arms, and the page of their runs."""

    folder: Path
    """The output folder of the study."""
    comparison: Comparison
    majority: str
    """Whose the majority answers are, as a sentence."""
    page: Report
    arms: list[ArmFigures]
    forgetting: list[Forgetting]
    contexts: list[ContextScores]
    left_out: list[str]
    """Runs that are not complete, and therefore not compared."""

    def to_json(self) -> dict[str, Any]:
        said = {"left_out": self.left_out, "majority": self.majority}
        return to_json(self.comparison) | said | self.page.to_json()

    @property
    def tables(self) -> list[Table]:
        """The figures of the arms, what each chain forgets, and what earlier answers in the prompts are worth."""
        return [
            arms_table(self.arms),
            *(one.table() for one in self.forgetting),
            *(context_table(one) for one in self.contexts),
        ]

    def text(self) -> str:
        """The comparison, what chains forget, and own, true and no earlier answers."""
        chains = [one.table() for one in self.forgetting]
        matrices = [f"exact match by stage\n{table(one.header, one.lines)}" for one in chains]
        contexts = [context_text(one) for one in self.contexts]
        return "\n\n".join([to_text(self.comparison), fill(self.majority, WIDTH), *matrices, *contexts])

    def write(self, page: Path) -> list[Path]:
        """Write the page, and the tables beside it; returns the paths of these."""
        write_text(page, self.page.to_page())
        return write_tables(self.tables, page)


def report_study(path: Path) -> StudyReport:
    """Compare the arms of a study, as far as their runs are complete.

    Raises:
        UsageError: fewer than two arms have a complete run, or the runs answered different questions.
        LookonceError: the study file, or a file of a run, is wrong.
    """
    study, status = read_study(path), StudyStatus.read(path)
    names = [f"{arm}-{seed}" for arm in study.compared() for seed in study.seeds]
    wanted = [name for name in names if status.has_answered(name)]
    left_out = [name for name in names if name not in wanted]
    _check(study, wanted, left_out, path)
    runs, majority = with_base_majority(study, _open(status))
    is_against_one = study.compare.baseline is not None
    answers = {name: run.answers for name, run in runs.items() if run.answers}
    comparison = compare([answers[name] for name in wanted], with_first_only=is_against_one)
    arms, forgetting = figures(comparison, study, runs), find_forgetting(study, answers)
    compared = [runs[name] for name in wanted]
    contexts = context_scores(compared)
    page = Report.of(compared, with_first_only=is_against_one)
    parts = sorted(page.parts, key=lambda part: part.key != "contexts")  # of arms, before what is of single runs
    learned = learning_curves(study, study.compared(), runs)
    parts = [arms_part(arms, majority), curves_part(learned), forgetting_part(forgetting), *parts]
    page = replace(page, parts=parts, of_what=f"the study {study.output.name}")
    return StudyReport(study.output, comparison, majority, page, arms, forgetting, contexts, left_out)


def _check(study: StudyFile, complete: list[str], left_out: list[str], path: Path) -> None:
    """Check that there is something to compare."""
    arms, baseline = {name.rpartition("-")[0] for name in complete}, study.compare.baseline
    if len(arms) < 2 or (baseline and baseline not in arms):
        needed = f"two arms with complete runs, {baseline} among them" if baseline else "two arms with complete runs"
        run = shell("lookonce", "study", "run", path)
        raise UsageError(f"a report needs {needed}; not complete: {listed(left_out, 9)}; run: {run}")


def _open(status: StudyStatus) -> Mapping[str, ReportedRun]:
    """The complete runs of a study by name, whose answers have the name of their arm; and the routed ones."""
    complete = [one for name, one in status.runs.items() if status.has_answered(name)]
    opened = {}
    for one, run in zip(complete, open_runs([one.run.output for one in complete]), strict=True):
        answers = replace(run.answers, name=one.arm, training=one.arm) if run.answers else None
        opened[one.name] = replace(run, answers=answers)
    return opened | {one.name: _routed(one) for one in status.routed.values() if status.has_answered(one.name)}


def _routed(one: RoutedRun) -> ReportedRun:
    one.write()  # its runs may have answered again
    answers = Run(one.arm, read_predictions(one.predictions), one.arm, one.seed)
    return ReportedRun(one.name, "", answers, None, None)
