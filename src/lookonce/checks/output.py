"""The folders that a run writes to: whether they may be written to, and whether the run folder is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lookonce.checks.images import CheckedImages
from lookonce.checks.report import Result
from lookonce.claim_file import EXPIRY_S, holder, is_living
from lookonce.disk_space import existing
from lookonce.errors import RunFolderError
from lookonce.run.config import RunFile
from lookonce.run.folder import CLAIM, RunFolder
from lookonce.run.start_adapter import start_identity


def check_output(run: RunFile, images: CheckedImages) -> list[Result]:
    """The run folder, and the folder of caches if features are to be written."""
    folders = {"output": run.output} | ({"cache.dir": run.cache.dir} if images.to_encode else {})
    results = [result for key, folder in folders.items() for result in _writable(key, folder)]
    return [*results, *_run_folder(run, images)]


def _writable(key: str, folder: Path) -> Iterator[Result]:
    place = existing(folder)
    if not place.is_dir():
        yield Result("error", "output", f"`{key}`: {place} is a file", f"choose another `{key}`")
    elif not os.access(place, os.W_OK | os.X_OK):
        yield Result("error", "output", f"`{key}`: {place} may not be written to", f"chmod u+w, or another `{key}`")


def _run_folder(run: RunFile, images: CheckedImages) -> Iterator[Result]:
    folder = RunFolder(run.output)
    if is_living(run.output / CLAIM, EXPIRY_S):
        used_by = holder(run.output / CLAIM, EXPIRY_S)
        yield Result("error", "output", f"{run.output} is in use by {used_by}", "wait until it has ended, or stop it")
        return
    try:
        identity = {"cache": images.fingerprint.sha256} if images.fingerprint else {}
        folder.check(run, identity | start_identity(run, folder.recorded_inputs()))
    except RunFolderError as error:
        yield Result("error", "output", str(error), "another `output`, or lookonce train RUN.yaml --restart")
        return
    where = str(run.output)
    if folder.is_finished:
        yield Result("warning", "output", f"{where} holds this run, finished", "--restart trains it again")
    elif folder.trained.exists() or folder.last_checkpoint:
        yield Result("warning", "output", f"{where} holds this run, unfinished", "lookonce train RUN.yaml --resume")
    else:
        yield Result("ok", "output", where)
