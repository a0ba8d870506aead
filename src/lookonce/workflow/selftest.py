"""Run the self-test before a training on a GPU, once for each combination of GPU, driver and library versions.

Design: the self-test runs in a process of its own. What it compiles and captures leaves no trace in the training, whose
numbers and memory therefore do not depend on whether it ran, and a kernel that crashes ends that process alone. The
result is noted; a way that is not noted as exact is tested again, so that a fault that is gone stops nothing.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from lookonce.errors import LookonceError, TrainingError
from lookonce.run.config import RunFile
from lookonce.run.open import Timed, untimed
from lookonce.selftest.note import VARIABLE, combination, is_noted_exact, save_note
from lookonce.selftest.report import Check, Report
from lookonce.selftest.run import run_selftest
from lookonce.selftest.ways import Way
from lookonce.text import Notify, count, duration, quiet

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
    first, num_checks = max(wrong, key=_excess), len(report.checks_of(way))
    found = first.error or f"differs by {first.difference:.1e}, allowed {first.allowed:.1e}"
    advice = f"lookonce train RUN.yaml {report.fastest}".strip()
    return (
        f"packs are not exact on this machine: {len(wrong)} of {num_checks} comparisons with stock rows "
        f"failed, first of all {first.what} ({found}); the fastest settings that are exact: {advice}; "
        f"the whole table: lookonce selftest; {SKIP}"
    )


def _excess(check: Check) -> float:
    return check.difference / check.allowed if check.allowed else float("inf")


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
