"""`lookonce study report`: the variants compared, as a page, as tables for a paper, and as JSON.

Design: runs of one variant are seeds of one another as the study has them, whatever their records are: a share of the
records that is drawn by the seed is another one for each. Runs that are not complete are left out, and named. The page
is that of `lookonce report` with the variants first.

A run's own majority answers are those of the records that it is trained on. A variant with a part of the records, such
as the last phase of a sequence, would be compared with the majority of that part, which answers the other stages badly.
So the rows get the majority of all training records of the base run, the same for every variant, and the scores beside
them follow. The run folders stay as they are.

A learning curve is that of a variant with all phases of its sequence, one behind another, since it costs what they
cost. Values are means over the seeds, at the steps that all of them have. Minutes are those of training, from the times
in the log; a training that was resumed has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from lookonce import plots
from lookonce.datasets.majority import Majority
from lookonce.errors import LookonceError, UsageError
from lookonce.eval.compare import LEVEL, WIDTH, Comparison, compare, to_json, to_text
from lookonce.eval.join import Run
from lookonce.eval.scores.metrics import Headline
from lookonce.eval.scores.prediction import read_predictions
from lookonce.eval.statistics import PERMUTATIONS
from lookonce.files import write_text
from lookonce.plots import Line, Panel
from lookonce.report.report import Report, write_plots
from lookonce.report.runs import ReportedRun, open_runs
from lookonce.run.config import read_run_file
from lookonce.run.folder import TrainedElsewhere
from lookonce.run.log_file import read_lines
from lookonce.run.records import read_splits
from lookonce.study.figures import (
    ArmFigures,
    Forgetting,
    Groups,
    Table,
    arms_table,
    context_table,
    context_text,
    figures,
    find_forgetting,
    group_tables,
    latex,
    phases_of,
    scores_of_groups,
)
from lookonce.study.file import StudyFile, read_study
from lookonce.study.state import RoutedRun, StudyStatus
from lookonce.text import count, first_line, listed, shell, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAJORITY_NOTE = "The majority answers are those of all training records of the base run, for every variant."
METRICS = {"validation_loss": "eval_loss", "exact_match": "eval_exact_match"}
"""The log's names of what is drawn."""
NAMES = {"validation_loss": "validation loss", "exact_match": "exact match while training"}
Axis = Literal["samples", "minutes"]
AXES: dict[Axis, str] = {"samples": "samples", "minutes": "minutes of training"}


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
    """What was measured of a variant and of the phases before it, in order."""

    arm: str
    phases: list[str]
    points: list[Measured]

    def points_of(self, metric: str, axis: Axis) -> dict[float, float]:
        points = {getattr(one, axis): getattr(one, metric) for one in self.points}
        return {x: y for x, y in points.items() if x is not None and y is not None}


def learning_curves(study: StudyFile, arms: Sequence[str], runs: Mapping[str, ReportedRun]) -> list[ArmCurve]:
    """The curves of those variants that are trained; `runs` are the complete ones, by name."""
    found = []
    for arm in (arm for arm in arms if arm in study.trained):
        phases = phases_of(arm, study)
        seeds = [seed for seed in study.seeds if all(f"{phase}-{seed}" in runs for phase in phases)]
        points = _joined([_mean([_measured(runs[f"{phase}-{seed}"]) for seed in seeds]) for phase in phases])
        if points:
            found.append(ArmCurve(arm, phases, points))
    return found


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
    """The means over seeds, at the steps that all have; None where a seed has no value."""
    steps = sorted(set(seeds[0]).intersection(*seeds[1:])) if seeds else []
    found = []
    for step in steps:
        by_field = zip(*(astuple(one[step]) for one in seeds), strict=True)
        means: list[Any] = [None if None in values else fmean(values) for values in by_field]
        found.append(Measured(*means))
    return found


def _joined(phases: Sequence[Sequence[Measured]]) -> list[Measured]:
    """The points of phases, each behind the last one of the phase before; none if a phase has none."""
    found: list[Measured] = []
    for phase in phases:
        before = found[-1] if found else Measured(0, 0, None, None)
        if not phase:
            return []
        for one in phase:
            has_time = one.minutes is not None and before.minutes is not None
            minutes = (before.minutes or 0) + (one.minutes or 0) if has_time else None
            found.append(replace(one, samples=before.samples + one.samples, minutes=minutes))
    return found


def curve_panels(found: Sequence[ArmCurve]) -> dict[str, tuple[Panel, str]]:
    """A panel for each metric and axis that is known, with the name of the axis; all variants are in each."""
    panels: dict[str, tuple[Panel, str]] = {}
    for metric in METRICS:
        for axis, name in AXES.items():
            known = [(one.arm, one.points_of(metric, axis)) for one in found]
            lines = [Line(arm, points, "marked", number) for number, (arm, points) in enumerate(known) if points]
            if lines:
                limits = (0.0, 1.0) if metric == "exact_match" else None
                panels[f"{NAMES[metric]} over {axis}"] = (Panel(NAMES[metric], lines, limits, height=260), name)
    return panels


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
    """The comparison of a study's variants, and the report of their runs."""

    folder: Path
    """The output folder of the study."""
    comparison: Comparison
    majority: str
    """Whose the majority answers are, as a sentence."""
    report: Report
    arms: list[ArmFigures]
    curves: list[ArmCurve]
    forgetting: list[Forgetting]
    groups: Groups
    methods: str
    """How the study was done, as a paragraph for a paper."""
    left_out: list[str]
    """Runs that are not complete, and therefore not compared."""

    def to_json(self) -> dict[str, Any]:
        said = {"left_out": self.left_out, "majority": self.majority, "methods": self.methods}
        parts: dict[str, Any] = {"arms": [asdict(one) for one in self.arms], "scores_by": self.groups}
        parts["learning_curves"] = [asdict(one) for one in self.curves] or None
        parts["forgetting"] = [asdict(one) for one in self.forgetting]
        return to_json(self.comparison) | said | parts | self.report.to_json()

    @property
    def tables(self) -> list[Table]:
        """The figures of the variants, their scores by question and stage, and what each sequence forgets."""
        forgotten = [one.table() for one in self.forgetting]
        return [arms_table(self.arms, self.majority), *group_tables(self.groups), *forgotten]

    def text(self) -> str:
        """The comparison, what sequences forget, and predicted, reference and no earlier answers."""
        forgotten = [one.table() for one in self.forgetting]
        matrices = [f"exact match by stage\n{table(one.header, one.lines)}" for one in forgotten]
        contexts = [context_text(one) for one in self.report.contexts]
        return "\n\n".join([to_text(self.comparison), fill(self.majority, WIDTH), *matrices, *contexts])

    def plots(self) -> dict[str, Figure]:
        """The forest plot, then the learning curves."""
        learned = {name: plots.curves([panel], axis) for name, (panel, axis) in curve_panels(self.curves).items()}
        return {"forest": plots.forest([asdict(one) for one in self.arms])} | learned

    def to_page(self) -> str:
        """The whole page as text."""
        first, seeds = self.arms[0], max(len(one.seeds) for one in self.arms)
        comparison, drawn = self.comparison, self.plots()
        forest, *learned = [plots.to_svg(plot, f"{name} of {self.folder.name}") for name, plot in drawn.items()]
        asked = f"{count(comparison.num_questions, 'question')} about {count(comparison.num_images, 'image')}"
        return self.report.to_page(
            "study.html.jinja",
            title=f"{self.folder.name}: {first.arm} against {count(len(self.arms) - 1, 'variant')}",
            lead=f"{count(len(self.arms), 'variant')} of one training, with {count(seeds, 'seed')} each, on {asked}.",
            named=[
                ("variants", f"{len(self.arms)}"),
                ("seeds each", f"{seeds}"),
                ("questions", f"{comparison.num_questions:,}"),
                ("images", f"{comparison.num_images:,}"),
                ("majority baseline", f"{first.majority:.1%}"),
            ],
            study=self,
            verdicts=[pair["sentence"] for pair in to_json(comparison)["pairs"]],
            forest=forest,
            learned=learned,
        )

    def write(self, page: Path, has_pdf: bool = False) -> list[Path]:
        """Write the page, and beside it the tables, the methods, and as PDF the plots; returns the paths of these."""
        write_text(page, self.to_page())
        texts = {f"{page.stem}-methods.tex": latex(self.methods) + "\n"}
        for one in (*self.tables, *map(context_table, self.report.contexts)):
            texts |= {f"{page.stem}-{one.name}.csv": one.to_csv(), f"{page.stem}-{one.name}.tex": one.to_latex()}
        for name, text in texts.items():
            write_text(page.with_name(name), text)
        return [page.with_name(name) for name in texts] + (write_plots(self.plots(), page) if has_pdf else [])


def report_study(path: Path) -> StudyReport:
    """Compare the variants of a study, as far as their runs are complete.

    Raises:
        UsageError: fewer than two variants have a complete run, or the runs answered different questions.
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
    compared = [runs[name] for name in wanted]
    arms = figures(comparison, study, runs)
    return StudyReport(
        folder=study.output,
        comparison=comparison,
        majority=majority,
        report=Report.of(compared, with_first_only=is_against_one),
        arms=arms,
        curves=learning_curves(study, study.compared(), runs),
        forgetting=find_forgetting(study, answers),
        groups=scores_of_groups(arms, answers),
        methods=methods(comparison, arms, compared),
        left_out=left_out,
    )


def methods(comparison: Comparison, arms: Sequence[ArmFigures], runs: Sequence[ReportedRun]) -> str:
    """How a study was done, as a paragraph for a paper."""
    trained = next((run.settings for run in runs if run.settings), None)
    split = next((run.split for run in runs if run.split), "")
    path = Path(trained.model.path) if trained else Path()
    adapters = f"LoRA adapters of rank {trained.lora.rank}" if trained else "adapters"
    model = f"{adapters} of {path.name if path.is_absolute() else path}"
    seeds = sorted({seed for one in arms for seed in one.seeds})
    names = listed([one.arm for one in arms], len(arms))
    return (
        f"We trained {model} in {count(len(arms), 'variant')} ({names}), each with the "
        f"{'seeds' if len(seeds) > 1 else 'seed'} {listed(list(map(str, seeds)), len(seeds))}, on cached features of "
        f"the frozen vision tower, and compared them on the {count(comparison.num_questions, 'question')} about "
        f"{count(comparison.num_images, 'image')} of the {split} split. The measure is exact match, the share of "
        "answers that equal a reference answer apart from spaces around it; that of a variant is the mean over its "
        "seeds. "
        f"Always giving a question's most frequent training answer (majority baseline) has {arms[0].majority:.1%}. "
        "Intervals are 95% Wilson intervals with the variance between images, since answers about one image are "
        "correlated; those of differences are paired by question. P values are of sign-flip tests by image with "
        f"{PERMUTATIONS:,} draws, after Holm's correction for {count(len(comparison.pairs), 'comparison')}. We call a "
        f"difference one beyond chance if its interval does not hold 0, p is below {LEVEL}, and it is larger than the "
        "difference between the best and the worst seed of either variant."
    )


def _check(study: StudyFile, complete: list[str], left_out: list[str], path: Path) -> None:
    """Check that there is something to compare."""
    arms, baseline = {name.rpartition("-")[0] for name in complete}, study.compare.baseline
    if len(arms) < 2 or (baseline and baseline not in arms):
        needed = "two variants with complete runs" + (f", {baseline} among them" if baseline else "")
        run = shell("lookonce", "study", "run", path)
        raise UsageError(f"a report needs {needed}; not complete: {listed(left_out, 9)}; run: {run}")


def _open(status: StudyStatus) -> Mapping[str, ReportedRun]:
    """The complete runs of a study by name, whose answers have the name of their variant; and the routed ones."""
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
