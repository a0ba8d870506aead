"""The majority baseline of a study: that of all training records of the base run, the same for every arm.

Design: a run's own majority answers are those of the records that it is trained on. An arm with a part of the records,
such as the last phase of a chain, would be compared with the majority of that part, which answers the other stages
badly. So the rows get the base run's, and the scores beside them follow. The run folders stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from lookonce.datasets.majority import Majority
from lookonce.errors import LookonceError
from lookonce.eval.scores.metrics import Headline
from lookonce.report.runs import ReportedRun
from lookonce.run.config import read_run_file
from lookonce.run.records import read_splits
from lookonce.study.file import StudyFile
from lookonce.text import first_line

NOTE = "The majority answers are those of all training records of the base run, for every arm."


def with_base_majority(study: StudyFile, runs: Mapping[str, ReportedRun]) -> tuple[Mapping[str, ReportedRun], str]:
    """The runs with the majority answers of the base run, and a note on whose they are.

    If the records cannot be read any more, the runs keep theirs, and the note says why.
    """
    try:
        majority = Majority.of_records(read_splits(read_run_file(study.base))["train"])
    except LookonceError as error:
        why = f"those of the base run cannot be read: {first_line(error)}"
        return runs, f"The majority answers are those of each run's own training records, because {why}"
    return {name: _with(majority, run) for name, run in runs.items()}, NOTE


def _with(majority: Majority, run: ReportedRun) -> ReportedRun:
    if run.answers is None:
        return run
    rows = [replace(row, majority=majority.answer(row.question)) for row in run.answers.predictions]
    if rows == run.answers.predictions:
        return run
    baselines = run.metrics["baselines"] | {"majority": asdict(Headline.of(rows, {}).baselines["majority"])}
    metrics = run.metrics | {"baselines": baselines}
    return replace(run, answers=replace(run.answers, predictions=rows), known_metrics=metrics)
