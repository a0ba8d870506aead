"""The run with whose adapter the training starts: whether it is trained, and its adapter has the shape of this one."""

from __future__ import annotations

from collections.abc import Iterator

from lookonce.checks.report import Result
from lookonce.errors import LookonceError
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.start_adapter import find_start


def check_start(run: RunFile) -> Iterator[Result]:
    """Whether `train.start_from` can be followed; a training that has begun does not need it any more."""
    if run.train.start_from is None or RunFolder(run.output).holds_work:
        return
    try:
        start = find_start(run)
    except LookonceError as error:
        yield Result("error", "start", str(error), "train that run, or correct `train.start_from`")
        return
    if start:
        yield Result("ok", "start", f"the adapter of {start.folder}")
