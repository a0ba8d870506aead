"""`lookonce study report`: the arms compared, by `lookonce compare` and on the page of `lookonce report`.

Design: runs of one arm are seeds of one another as the study has them, whatever their records are: a share of the
records that is drawn by the seed is another one for each. Runs that are not complete are left out, and named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from lookonce.errors import UsageError
from lookonce.eval.comparison.compare import Comparison, compare
from lookonce.report.report import Report
from lookonce.report.runs import open_runs
from lookonce.study.file import read_study
from lookonce.study.table import StudyStatus
from lookonce.text import listed


@dataclass(frozen=True)
class StudyReport:
    """The comparison of a study's arms, and the page of their runs."""

    folder: Path
    """The output folder of the study."""
    comparison: Comparison
    page: Report
    left_out: list[str]
    """Runs that are not complete, and therefore not compared."""


def report_study(path: Path) -> StudyReport:
    """Compare the arms of a study, as far as their runs are complete.

    Raises:
        UsageError: fewer than two arms have a complete run, or the runs answered different questions.
        LookonceError: the study file, or a file of a run, is wrong.
    """
    study, status = read_study(path), StudyStatus.read(path)
    wanted = [one for arm in study.compared() for one in status.runs.values() if one.arm == arm]
    complete = [one for one in wanted if status.is_current(one.name) and status.states[one.name].score]
    left_out = [one.name for one in wanted if one not in complete]
    arms = {one.arm for one in complete}
    baseline = study.compare.baseline
    if len(arms) < 2 or (baseline and baseline not in arms):
        needed = f"two arms with complete runs, {baseline} among them" if baseline else "two arms with complete runs"
        raise UsageError(
            f"a report needs {needed}; not complete: {listed(left_out, 9)}; run: lookonce study run {path}"
        )
    grouped = [
        replace(run, answers=replace(run.answers, name=one.arm, training=one.arm) if run.answers else None)
        for one, run in zip(complete, open_runs([one.run.output for one in complete]), strict=True)
    ]
    answers = [run.answers for run in grouped if run.answers]
    compared = compare(answers, with_first_only=baseline is not None)
    page = Report.of(grouped, with_first_only=baseline is not None)
    return StudyReport(study.output, compared, page, left_out)
