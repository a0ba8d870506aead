"""`lookonce train`: test that packs are exact, train, answer the questions of the evaluation split, summarise, report.

Design: this is above training and evaluation, so that training does not import evaluation. Before a training on a GPU
the self-test runs once for each combination of GPU, driver and library versions, in a process of its own. What it
compiles and captures leaves no trace in the training, whose numbers and memory therefore do not depend on whether it
ran, and a kernel that crashes ends that process alone. The result is noted; a way that is not noted as exact is tested
again, so that a fault that is gone stops nothing.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from lookonce.disk_space import full_disk_named
from lookonce.environment import rank
from lookonce.errors import LookonceError, TrainingError
from lookonce.eval.answers.accuracy import Accuracy
from lookonce.eval.answers.questions import Questions
from lookonce.eval.run import evaluate
from lookonce.eval.scores.metrics import Evaluation
from lookonce.files import write_json
from lookonce.report.report import report_training
from lookonce.report.runs import DataFacts
from lookonce.run.config import RunFile
from lookonce.run.open import OpenRun, Timed, untimed
from lookonce.run.records import HELD_OUT
from lookonce.run.startup import Startup
from lookonce.selftest.report import VARIABLE, Report, Way, combination, is_noted_exact, save_note
from lookonce.selftest.run import run_selftest
from lookonce.summary import Summary, summarise
from lookonce.text import Notify, count, duration, first_line, quiet, shell
from lookonce.train.loop.checkpoints import OTHER_BYTES, kept
from lookonce.train.model.frozen import frozen_of_answers
from lookonce.train.model.load import load_trained
from lookonce.train.train import Training, open_training

OFF = ("off", "0", "false", "no")
"""Values of the environment variable that skip the self-test."""
SKIP = f"{VARIABLE}=off in the environment skips the test"


def check_exact(run: RunFile, notify: Notify, timed: Timed = untimed) -> None:
    """Check that packs are exact in the way in which this run computes them, if it has a GPU and packs.

    `timed` times the test, if there is one, by its name.

    Raises:
        TrainingError: they are not; names the fastest settings that are exact.
    """
    if not torch.cuda.is_available() or not run.batch.has_packs or os.environ.get(VARIABLE, "").lower() in OFF:
        return
    way, precision = Way.of(run), run.train.precision
    if is_noted_exact(combination(precision), way):
        return
    notify("first training with this GPU, driver and libraries; testing that packs are exact, which takes a minute")
    with timed("test that packs are exact"):
        report = in_own_process(partial(run_selftest, own=way, precision=precision, notify=quiet))
    save_note(report, notify)
    if way not in report.exact:
        raise TrainingError(not_exact(report, way))
    compared = count(len(report.checks), "comparison")
    notify(f"packs are exact here: {compared} in {duration(report.seconds)}")


def not_exact(report: Report, way: Way) -> str:
    """The message for a way that is not exact: the largest mismatch, and the settings to train with."""
    wrong = [check for check in report.checks_of(way) if not check.ok]
    first = max(wrong, key=lambda check: check.difference / check.allowed if check.allowed else float("inf"))
    num_checks = len(report.checks_of(way))
    found = first.error or f"differs by {first.difference:.1e}, allowed {first.allowed:.1e}"
    advice = f"lookonce train RUN.yaml {report.fastest}".strip()
    return (
        f"packs are not exact on this machine: {len(wrong)} of {num_checks} comparisons with stock rows "
        f"failed, first of all {first.what} ({found}); the fastest settings that are exact: {advice}; "
        f"the whole table: lookonce selftest; {SKIP}"
    )


def in_own_process(function: Callable[[], Report]) -> Report:
    """What the function returns in a new process, which is killed if this one is interrupted.

    Raises:
        TrainingError: the process ended without a result.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(function, sender), daemon=True)
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        process.join()
        killed = " (killed, as Linux does if there is no memory left)" if process.exitcode == -signal.SIGKILL else ""
        raise TrainingError(
            f"the self-test ended with exit code {process.exitcode}{killed} and without a result; see what it prints "
            f"with: lookonce selftest; {SKIP}"
        ) from None
    finally:
        process.kill()
        process.join()
    if isinstance(found, LookonceError):
        raise found
    assert isinstance(found, Report)
    return found


def _send(function: Callable[[], Report], sender: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        sender.send(function())
    except LookonceError as error:
        sender.send(error)


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
    training = open_training(
        run, resume=resume, restart=restart, verify_images=verify_images, notify=notify, startup=startup
    )
    with training.opened as opened:
        if training.start.is_finished:
            opened.notify(
                f"{run.output} is already trained; the summary below was written then (--restart trains again)"
            )
            return Summary.read(opened.folder) if training.ranks.is_first else None
        training.ranks.first_decides(lambda: check_exact(run, opened.notify, startup.timed))
        training.begin(restart=restart)
        what, folder = f"the files of {run.output}", opened.folder
        small_files = full_disk_named(run.output, OTHER_BYTES, what, lambda: kept(folder))
        with training.heartbeat() as heartbeat, small_files:
            model = training.run(heartbeat, _accuracy(training))
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
    """What measures exact match while training; None if there is nothing to measure, or the run is trained."""
    opened = training.opened
    if training.start.is_trained or not opened.run.eval.every or not opened.records["val"]:
        return None
    with training.startup.timed("make prompts of val questions"):
        return Accuracy(opened, training.ranks)


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
