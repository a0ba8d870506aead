"""The claim of a run folder: one process at a time changes it.

Design: `claim.json` in the folder names the process that trains or evaluates there (../claim_file.py). It is taken
before any input is read, so that a second process is refused at once, and released when the process ends; commands that
only read do not ask for it. A process that was suspended until another took over notices before its next write. With
--restart the claim file moves away with the folder, and the name is claimed again; if another process is faster in that
moment, it keeps the folder, and this one is refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from lookonce.cache.store.claims import using
from lookonce.claim_file import EXPIRY_S, IN_USE, FolderClaim, Process, holder, is_living, read_process_file
from lookonce.disk_space import free_bytes
from lookonce.errors import FolderInUse, RunFolderError
from lookonce.files import is_full
from lookonce.run.folder import CLAIM, RECORD, RunFolder
from lookonce.text import size

TRAIN = "lookonce train"
POLL_S = 0.1


class RunClaim:
    """This process's claim of a run folder, once `take` has got it; a context manager that releases it."""

    def __init__(self, folder: Path, command: str, expiry_s: float = EXPIRY_S) -> None:
        """`command` says what this process does: "lookonce train"."""
        self.folder, self._command, self._expiry_s = folder, command, expiry_s
        self._claim = self._unclaimed()
        self._is_new = False
        self._caches = contextlib.ExitStack()

    def __enter__(self) -> RunClaim:
        return self

    def __exit__(self, *_: object) -> None:
        self._caches.close()
        self._claim.__exit__()
        if self._is_new:
            with contextlib.suppress(OSError):  # not empty
                self.folder.rmdir()

    def use_cache(self, folder: Path) -> None:
        """Use a cache, if there is one, until this claim is released; raises CacheError if another process owns it."""
        if folder.is_dir():
            self._caches.enter_context(using(folder, self._command, self._expiry_s))

    def take(self, patience_s: float = 0.0) -> None:
        """Claim the folder, which is made if it does not exist; waits up to `patience_s` while another process uses it.

        Raises:
            RunFolderError: another process uses it, or it cannot be written to.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise RunFolderError(f"{self.folder} is a file; choose another `output`")
        self._is_new = not self.folder.exists()
        deadline = time.monotonic() + patience_s
        try:
            while (used_by := self._claim.take()) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        except OSError as error:
            how = f"make room ({size(free_bytes(self.folder))} are free there)" if is_full(error) else "allow it"
            raise RunFolderError(
                f"cannot write to {self.folder} ({error.strerror}); {how}, or choose another `output`"
            ) from None
        if used_by:
            raise FolderInUse(f"{self.folder} {IN_USE} {used_by}; wait until it has ended, or stop it")

    @property
    def is_taken(self) -> bool:
        """Whether this process has taken the claim; another one may have taken over since."""
        return self._claim.is_taken

    def is_lost(self) -> bool:
        """Whether another process has taken over."""
        return self._claim.is_lost()

    def check(self) -> None:
        """Check that the folder is still this process's, before writing to it.

        Raises:
            RunFolderError: another process has taken over, or the folder was moved.
        """
        if self.is_lost():
            path = self._claim.path
            by = f", now in use by {holder(path, self._expiry_s)}" if path.exists() else ""
            raise RunFolderError(
                f"{self.folder} was taken over by another process or moved while this one was suspended{by}; this "
                "process ends without writing to it"
            )

    def move_away(self) -> Path | None:
        """Move the run in the folder away, and claim the folder again; returns the new path, or None without a run.

        Raises:
            RunFolderError: another process has claimed the folder in between.
        """
        moved = RunFolder(self.folder).move_away()
        if moved:
            with self._claim as before:
                before.follow(moved / CLAIM)
                self._claim = self._unclaimed()
                self.take()
        return moved

    def _unclaimed(self) -> FolderClaim:
        return FolderClaim(self.folder / CLAIM, self._command, self._expiry_s)


@contextlib.contextmanager
def claimed_around(output: Path, command: str) -> Iterator[None]:
    """Claim, within the block, the run folder in which a file or folder is to be written, if it lies in one.

    Raises:
        RunFolderError: another process uses the run folder, or its record is broken.
    """
    around = next((folder for folder in output.absolute().parents if (folder / RECORD).exists()), None)
    if around is None:
        yield
        return
    with RunClaim(around, command, RunFolder(around).read_run().cache.claim_s) as owner:
        try:
            owner.take()
        except FolderInUse as error:
            raise FolderInUse(f"{output} cannot be written: {error}, or name a place outside of that folder") from None
        yield


def find_trainer(folder: Path, expiry_s: float) -> Process | None:
    """The living process that has claimed a run folder to train; None if there is none."""
    path = folder / CLAIM
    if not is_living(path, expiry_s):
        return None
    return read_process_file(path, lambda worker, command, **_: worker if command == TRAIN else None)
