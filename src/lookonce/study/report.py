"""`lookonce study report`: the variants compared, as a page, as files for a paper, and as JSON.

Runs of one variant are seeds of one another as the study has them, even if each seed draws other records. Runs that are
not complete are left out, and named. The page is that of `lookonce report` with the variants first.

A variant with a part of the records, such as the last phase of a sequence, has the majority answers of that part, which
answer the other stages badly. So all rows get the majority of the training records of the base run, and the scores
beside them follow. The run folders stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lookonce import page
from lookonce.datasets.balance import Majority
from lookonce.errors import LookonceError, UsageError
from lookonce.eval.compare import LEVEL, WIDTH, Comparison, compare, to_json, to_text
from lookonce.eval.scores.metric import EXACT, name_of
from lookonce.eval.scores.metrics import headline
from lookonce.eval.statistics import PERMUTATIONS
from lookonce.files import write_text
from lookonce.report.contexts import context_text
from lookonce.report.report import Report, write_plots
from lookonce.report.runs import ReportedRun, open_runs
from lookonce.run.config import read_run_file
from lookonce.run.records import read_splits
from lookonce.study.figures import (
    Forgetting,
    Groups,
    Table,
    VariantFigures,
    context_table,
    figures,
    find_forgetting,
    group_tables,
    scores_of_groups,
    variants_table,
)
from lookonce.study.file import StudyFile, read_study
from lookonce.study.state import StudyStatus
from lookonce.text import count, first_line, listed, shell, table
from lookonce.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAJORITY_NOTE = "The majority answers are those of all training records of the base run, for every variant."


def with_base_majority(study: StudyFile, runs: Mapping[str, ReportedRun]) -> tuple[Mapping[str, ReportedRun], str]:
    """The runs with the majority answers of the base run, and a note on whose they are.

    If the records cannot be read any more, the runs keep theirs, and the note says why.
    """
    try:
        majority = Majority.of_records(read_splits(read_run_file(study.base))["train"])
    except LookonceError as error:
        why = f"those of the base run cannot be read: {first_line(error)}"
        return runs, f"The majority answers are those of each run's own training records, because {why}"
    return {name: _with_majority(majority, run) for name, run in runs.items()}, MAJORITY_NOTE


def _with_majority(majority: Majority, run: ReportedRun) -> ReportedRun:
    if run.answers is None:
        return run
    rows = [replace(row, majority=majority.answer(row.question)) for row in run.answers.predictions]
    if rows == run.answers.predictions:
        return run
    head, scored = headline([row.in_nfc for row in rows], {}, run.answers.metric)
    beside = scored["majority"]
    baselines = run.metrics["baselines"] | {"majority": asdict(beside)}
    metrics = run.metrics | {"baselines": baselines, "headline": asdict(head)}
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
    variants: list[VariantFigures]
    forgetting: list[Forgetting]
    groups: Groups
    methods: str
    """How the study was done, as a paragraph for a paper."""
    left_out: list[str]
    """Runs that are not complete, and therefore not compared."""

    def to_json(self) -> dict[str, Any]:
        parts = {
            "left_out": self.left_out,
            "majority": self.majority,
            "methods": self.methods,
            "variants": [asdict(variant) for variant in self.variants],
            "scores_by": self.groups,
            "forgetting": [asdict(matrix) for matrix in self.forgetting],
        }
        return to_json(self.comparison) | parts | self.report.to_json()

    @property
    def tables(self) -> list[Table]:
        """The figures of the variants, their scores by question and stage, and the forgetting of each sequence."""
        forgetting = [matrix.table() for matrix in self.forgetting]
        return [variants_table(self.variants, self.majority), *group_tables(self.groups), *forgetting]

    def text(self) -> str:
        """The comparison, forgetting, and predicted, reference and no earlier answers."""
        forgetting = [matrix.table() for matrix in self.forgetting]
        matrices = [f"exact match by stage\n{table(matrix.header, matrix.lines)}" for matrix in forgetting]
        contexts = [context_text(scores) for scores in self.report.contexts]
        return "\n\n".join([to_text(self.comparison), fill(self.majority, WIDTH), *matrices, *contexts])

    def plots(self) -> dict[str, Figure]:
        """The forest plot, then the curves of the runs."""
        return {"forest": self._forest()} | self.report.plots()

    def _forest(self) -> Figure:
        return page.forest([asdict(variant) for variant in self.variants], self.measure)

    @property
    def measure(self) -> str:
        """What counts, in words."""
        return name_of(self.comparison.metric)

    def write(self, path: Path, has_pdf: bool = False) -> list[Path]:
        """Write the page, and beside it the tables, the methods, and as PDF the plots; returns the paths of these."""
        write_text(path, self.to_page())
        methods = path.with_name(f"{path.stem}-methods.tex")
        write_text(methods, page.latex(self.methods) + "\n")
        tables = [*self.tables, *map(context_table, self.report.contexts)]
        written = [methods, *(file for result_table in tables for file in result_table.write(path))]
        return written + (write_plots(self.plots(), path) if has_pdf else [])

    def to_page(self) -> str:
        first, seeds = self.variants[0], max(len(variant.seeds) for variant in self.variants)
        comparison = self.comparison
        questions = f"{count(comparison.num_questions, 'question')} about {count(comparison.num_images, 'image')}"
        return self.report.to_page(
            "study.html.jinja",
            title=f"{self.folder.name}: {first.variant} against {count(len(self.variants) - 1, 'variant')}",
            lead=f"{count(len(self.variants), 'variant')} of a training, with {count(seeds, 'seed')} each, "
            f"on {questions}.",
            named=[
                ("variants", f"{len(self.variants)}"),
                ("seeds each", f"{seeds}"),
                ("questions", f"{comparison.num_questions:,}"),
                ("images", f"{comparison.num_images:,}"),
                ("majority baseline", f"{first.majority:.1%}"),
            ],
            study=self,
            verdicts=[pair["sentence"] for pair in to_json(comparison)["pairs"]],
            forest=page.to_svg(self._forest(), f"forest of {self.folder.name}"),
        )


def report_study(path: Path) -> StudyReport:
    """Compare the variants of a study, as far as their runs are complete.

    Raises:
        UsageError: fewer than two variants have a complete run, or the runs answered different questions.
        LookonceError: the study file, or a file of a run, is wrong.
    """
    study, status = read_study(path), StudyStatus.read(path)
    names = [f"{variant}-{seed}" for variant in study.compared() for seed in study.seeds]
    answered = [name for name in names if status.has_answered(name)]
    left_out = [name for name in names if name not in answered]
    _check(study, answered, left_out, path)
    runs, majority = with_base_majority(study, _open(status))
    is_against_one = study.compare.baseline is not None
    answers = {name: run.answers for name, run in runs.items() if run.answers}
    comparison = compare([answers[name] for name in answered], with_first_only=is_against_one)
    variants, compared = figures(comparison, study, runs), [runs[name] for name in answered]
    return StudyReport(
        folder=study.output,
        comparison=comparison,
        majority=majority,
        report=Report.of(compared, with_first_only=is_against_one),
        variants=variants,
        forgetting=find_forgetting(study, answers),
        groups=scores_of_groups(variants, answers),
        methods=methods(comparison, variants, compared),
        left_out=left_out,
    )


def methods(comparison: Comparison, variants: Sequence[VariantFigures], runs: Sequence[ReportedRun]) -> str:
    """How a study was done, as a paragraph for a paper."""
    settings = [run.settings for run in runs if run.settings]
    text = page.render(
        "methods.txt.jinja",
        version=__version__,
        ranks=sorted({run_settings.lora.rank for run_settings in settings}),
        models=sorted({Path(run_settings.model.path).name for run_settings in settings}),
        split=next((run.split for run in runs if run.split), ""),
        seeds=sorted({seed for variant in variants for seed in variant.seeds}),
        variants=variants,
        comparison=comparison,
        measure=name_of(comparison.metric),
        is_exact=comparison.metric == EXACT,
        permutations=PERMUTATIONS,
        level=LEVEL,
    )
    return " ".join(text.split())


def _check(study: StudyFile, complete: list[str], left_out: list[str], path: Path) -> None:
    """Check that there is something to compare."""
    variants, baseline = {name.rpartition("-")[0] for name in complete}, study.compare.baseline
    if len(variants) < 2 or (baseline and baseline not in variants):
        needed = "two variants with complete runs" + (f", {baseline} among them" if baseline else "")
        run = shell("lookonce", "study", "run", path)
        raise UsageError(f"a report needs {needed}; not complete: {listed(left_out, 9)}; run: {run}")


def _open(status: StudyStatus) -> Mapping[str, ReportedRun]:
    """The complete runs of a study by name, whose answers have the name of their variant; and the routed ones."""
    complete = [study_run for name, study_run in status.runs.items() if status.has_answered(name)]
    opened = {}
    for study_run, run in zip(complete, open_runs([study_run.settings.output for study_run in complete]), strict=True):
        answers = replace(run.answers, name=study_run.variant, training=study_run.variant) if run.answers else None
        opened[study_run.name] = replace(run, answers=answers)
    for routed in status.routed.values():
        if status.has_answered(routed.name):  # written again, since its runs may have answered again
            opened[routed.name] = ReportedRun(routed.name, "", routed.write(), None, None)
    return opened
