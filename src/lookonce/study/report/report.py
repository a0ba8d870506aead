"""`lookonce study report`: the arms compared, by `lookonce compare` and on the page of `lookonce report`.

Design: runs of one arm are seeds of one another as the study has them, whatever their records are: a share of the
records that is drawn by the seed is another one for each. Runs that are not complete are left out, and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

from lookonce.errors import UsageError
from lookonce.eval.compare import WIDTH, Comparison, compare, to_json, to_text
from lookonce.eval.join import Run
from lookonce.eval.scores.prediction import read_predictions
from lookonce.files import write_text
from lookonce.report.contexts import ContextScores, context_scores
from lookonce.report.report import Report
from lookonce.report.runs import ReportedRun, open_runs
from lookonce.study.file import StudyFile, read_study
from lookonce.study.report.arms import ArmFigures, arms_part, arms_table, figures
from lookonce.study.report.contexts import context_table, context_text
from lookonce.study.report.curves import curves_part, learning_curves
from lookonce.study.report.forgetting import Forgetting, find_forgetting, forgetting_part
from lookonce.study.report.majority import with_base_majority
from lookonce.study.report.tables import Table, write_tables
from lookonce.study.routing import RoutedRun
from lookonce.study.table import StudyStatus
from lookonce.text import listed, shell, table

PAGE = "report.html"
"""The page in the output folder of a study, unless another is named."""


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
