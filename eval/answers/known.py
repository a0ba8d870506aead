"""Answers of evaluations that have ended, which need not be given again.

Design: `answering/NAME.json` has the identity of what the answers depended on, apart from the machine, so that answers
are found again on another one. Only what the model gave is taken from the rows of the file: references, labels and
majority answers are those of the records as they are now. While an evaluation of that name is unfinished, its file may
be the one before, so it does not count.
"""

from __future__ import annotations

from lookonce.errors import RecordsError, RunFolderError
from lookonce.eval.answers.baselines import as_asked
from lookonce.eval.answers.cost import AnsweringCost
from lookonce.eval.answers.partial import is_begun
from lookonce.eval.answers.questions import Questions
from lookonce.eval.scores.headline import BASELINES, IN_CONTEXT, Baseline
from lookonce.eval.scores.prediction import Prediction, read_predictions
from lookonce.run.folder import RunFolder


def known_predictions(folder: RunFolder, questions: Questions) -> list[Prediction] | None:
    """The predictions of an evaluation that asked the same; None if there was none or its files are damaged."""
    path = folder.predictions(questions.name)
    if not path.exists() or is_begun(path.parent, questions.name):
        return None
    try:
        cost = AnsweringCost.read(folder.answering(questions.name))
    except RunFolderError:
        return None
    if cost.identity != questions.identity(folder):
        return None
    try:
        before = read_predictions(path)
    except RecordsError:
        return None
    if len(before) != len(questions.asked):
        return None
    return questions.again(before)


def known_baselines(folder: RunFolder, questions: Questions) -> dict[Baseline, list[str]]:
    """The answers of the baselines to a run's own questions, as far as they are known."""
    each = (*BASELINES, *IN_CONTEXT)
    asked = {one: as_asked(questions, one) for one in each if folder.answering(questions.name_of(one)).exists()}
    found = {one: known_predictions(folder, those) for one, those in asked.items()}
    return {one: [row.predicted for row in rows] for one, rows in found.items() if rows is not None}
