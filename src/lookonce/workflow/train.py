"""`lookonce train`: train, answer the questions of the evaluation split, summarise.

Design: this is above training and evaluation, so that training does not import evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lookonce.disk_space import full_disk_named
from lookonce.environment import rank
from lookonce.eval.answers.accuracy import Accuracy
from lookonce.eval.answers.questions import Questions
from lookonce.eval.run import evaluate
from lookonce.eval.scores.metrics import Evaluation
from lookonce.files import write_json
from lookonce.report.data import DataFacts
from lookonce.report.report import report_training
from lookonce.run.claim import TRAIN, RunClaim
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.inputs import RunInputs
from lookonce.run.records import HELD_OUT
from lookonce.run.startup import Startup
from lookonce.status.summary import Summary, summarise
from lookonce.text import Notify, first_line, quiet, shell
from lookonce.train.loop.checkpoints import OTHER_BYTES, kept
from lookonce.train.model.frozen.choice import frozen_of_answers
from lookonce.train.model.load import load_trained
from lookonce.train.train import Training, open_training
from lookonce.workflow.selftest import check_exact


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
    with RunClaim(run.output, TRAIN, run.cache.claim_s) as owner:
        return _train(run, owner, resume, restart, verify_images, notify, startup)


def _train(
    run: RunFile,
    owner: RunClaim,
    resume: bool,
    restart: bool,
    verify_images: bool,
    notify: Notify,
    startup: Startup,
) -> Summary | None:
    def before_claim(inputs: RunInputs) -> None:
        check_exact(run, notify, startup.timed)

    ranks, training = open_training(
        run,
        owner,
        resume=resume,
        restart=restart,
        verify_images=verify_images,
        before_claim=before_claim,
        notify=notify,
        startup=startup,
    )
    if training is None:
        if not ranks.is_first:
            return None
        notify(f"{run.output} is already trained; the summary below was written then (--restart trains again)")
        return Summary.read(RunFolder(run.output))
    what, folder = f"the files of {run.output}", training.folder
    small_files = full_disk_named(run.output, OTHER_BYTES, what, lambda: kept(folder))
    with training.heartbeat() as heartbeat, training.tracking() as trackers, small_files:
        model = training.run(heartbeat, trackers, _accuracy(training))
        if not ranks.is_first:
            return None
        heartbeat.enter("evaluating")
        if frozen_of_answers(run) != run.train.frozen:
            model = None  # and loaded again, with the other frozen weights
        evaluation = _evaluate(training, model)
        del model
        summary = summarise(training.session.inputs, training.session.cache, training.folder.read_trained(), evaluation)
        owner.check()
        summary = replace(summary, report=_report(training, summary))
        write_json(training.folder.summary, summary.to_json())
        trackers.log_scores(summary.scores(), summary.num_steps)
    return summary


def _accuracy(training: Training) -> Accuracy | None:
    """What measures exact match while training; None if there is nothing to measure, or the run is trained."""
    inputs = training.session.inputs
    if training.start.is_trained or not inputs.run.eval.every or not inputs.records["val"]:
        return None
    with training.startup.timed("make prompts of val questions"):
        return Accuracy(training.session, training.ranks, training.notify)


def _report(training: Training, summary: Summary) -> str | None:
    """Write the report and return its path; None with a note if that fails, because a page is not worth a training."""
    inputs, folder = training.session.inputs, training.folder
    try:
        data = DataFacts.of(inputs.run, inputs.records, inputs.images.key_of)
        return str(report_training(folder, summary.to_json(), data))
    except Exception as error:
        training.notify(
            f"no report was written ({first_line(error)}); to try again: {shell('lookonce', 'report', folder.folder)}"
        )
        return None


def _evaluate(training: Training, model: Any) -> Evaluation | None:
    """Evaluate the trained model, or the adapter in the run folder; None without questions or without enough memory.

    A run that holds records out first answers the questions of these and of val, because contexts of another run have
    their answers.
    """
    inputs, run = training.session.inputs, training.session.inputs.run
    trained = cache(lambda: model or load_trained(inputs.model_folder, run, training.folder.adapter))
    try:
        for split in sorted({HELD_OUT, "val"} - {run.eval.split}) if run.data.held_out else ():
            _answer(training, split, trained, reuses=True)
        return _answer(training, run.eval.split, trained)
    except torch.OutOfMemoryError:
        if not run.train.fsdp:
            raise
        training.notify(
            "out of memory: the model does not fit on one GPU, so no questions were answered; "
            f"on a larger one run: {shell('lookonce', 'eval', training.folder.folder)}"
        )
        return None


def _answer(training: Training, split: str, trained: Callable[[], Any], *, reuses: bool = False) -> Evaluation | None:
    """The answers of a model to the questions of a split; None without any."""
    if not training.session.inputs.records[split]:
        return None
    questions, open_model = Questions.of(training.session, split), lambda: nullcontext(trained())
    return evaluate(questions, training.owner, open_model, notify=training.notify, reuses=reuses)
