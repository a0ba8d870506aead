"""`lookonce train`: train, answer the questions of the evaluation split, summarise, report.

Design: this is above training and evaluation, so that training does not import evaluation.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lookonce.disk_space import full_disk_named
from lookonce.environment import rank
from lookonce.eval.answers.accuracy import Accuracy
from lookonce.eval.answers.policy import Policy
from lookonce.eval.answers.questions import Questions
from lookonce.eval.run import evaluate
from lookonce.eval.scores.metric import check_metric
from lookonce.eval.scores.metrics import Evaluation
from lookonce.files import write_json
from lookonce.report.report import report_training
from lookonce.report.runs import DataFacts
from lookonce.run.config import RunFile
from lookonce.run.open import OpenRun
from lookonce.run.records import HELD_OUT
from lookonce.run.startup import Startup
from lookonce.summary import Summary, summarise
from lookonce.text import Notify, first_line, quiet, shell
from lookonce.train.loop.checkpoints import OTHER_BYTES, kept
from lookonce.train.model.frozen import frozen_of_answers
from lookonce.train.model.load import load_trained
from lookonce.train.train import Training, open_training


def train(
    run: RunFile,
    *,
    resume: bool = False,
    restart: bool = False,
    verify_images: bool = False,
    notify: Notify = print,
    startup: Startup | None = None,
) -> Summary | None:
    """Train a run from its cache, evaluate the adapter, and write the summary, which is also returned.

    A finished run is not trained again. `resume` continues from the last checkpoint; `restart` first moves the run in
    the folder away. `verify_images` reads all images, which training does not need, and compares them with the cache.
    Under torchrun only the first rank evaluates the adapter; the others return None. `startup` was begun by the caller.

    Raises:
        Stopped: a signal asked the training to stop; the current step is saved.
        LookonceError: any other error that a user can fix.
    """
    startup = startup or Startup(notify if rank() == 0 else quiet)
    check_metric(run.eval.metric)
    training = open_training(
        run, resume=resume, restart=restart, verify_images=verify_images, notify=notify, startup=startup
    )
    with training.opened as opened:
        if training.start.is_finished:
            opened.notify(
                f"{run.output} is already trained; the summary below was written then (--restart trains again)"
            )
            return Summary.read(opened.folder) if training.ranks.is_first else None
        training.begin(restart=restart)
        content, folder = f"the files of {run.output}", opened.folder
        small_files = full_disk_named(run.output, OTHER_BYTES, content, lambda: kept(folder))
        with training.heartbeat() as heartbeat, small_files:
            model = training.run(heartbeat, _accuracy(training), _policy(training))
            if not training.ranks.is_first:
                return None
            heartbeat.enter("evaluating")
            if frozen_of_answers(run) != run.train.frozen:
                model = None  # and loaded again, with the other frozen weights
            evaluation = _evaluate(opened, model)
            del model
            summary = summarise(opened, evaluation)
            opened.owner.check()
            summary = replace(summary, report=_report(opened, summary))
            write_json(folder.summary, summary.to_json())
        return summary


def _accuracy(training: Training) -> Accuracy | None:
    """What scores answers while training; None if there is nothing to measure, or the run is trained."""
    opened = training.opened
    if training.start.is_trained or not opened.run.eval.every or not opened.records["val"]:
        return None
    with training.startup.timed("make prompts of val questions"):
        return Accuracy(opened, training.ranks)


def _policy(training: Training) -> Policy | None:
    """What draws answers in a training by rewards; None in any other."""
    is_needed = training.questions and training.opened.run.train.objective == "grpo"
    return Policy(training.opened, training.questions, training.ranks) if is_needed else None


def _report(opened: OpenRun, summary: Summary) -> str | None:
    """Write the report and return its path; None with a note if that fails, because a page is not worth a training."""
    folder = opened.folder
    try:
        data = DataFacts.of(opened.run, opened.records, opened.images.key_of)
        return str(report_training(folder, summary.to_json(), data))
    except Exception as error:
        opened.notify(
            f"no report was written ({first_line(error)}); to try again: {shell('lookonce', 'report', folder.folder)}"
        )
        return None


def _evaluate(opened: OpenRun, model: Any) -> Evaluation | None:
    """Evaluate the trained model, or the adapter in the run folder; None without questions or without enough memory.

    A run that holds records out first answers the questions of these and of val, because contexts of another run have
    their answers.
    """
    run = opened.run
    trained = cache(lambda: model or load_trained(opened.model_folder, run, opened.folder.adapter))

    def answer(split: str, *, reuses: bool = False) -> Evaluation | None:
        if not opened.records[split]:
            return None
        return evaluate(Questions.of(opened, split), lambda: nullcontext(trained()), reuses=reuses)

    try:
        for split in sorted({HELD_OUT, "val"} - {run.eval.split}) if run.data.held_out else ():
            answer(split, reuses=True)
        return answer(run.eval.split)
    except torch.OutOfMemoryError:
        if not run.train.fsdp:
            raise
        opened.notify(
            "out of memory: the model does not fit on one GPU, so no questions were answered; "
            f"on a larger one run: {shell('lookonce', 'eval', opened.folder.folder)}"
        )
        return None
