"""Errors that a user can fix; the program itself is not at fault.

    LookonceError               the command line prints it without a traceback, exit code 1
    |- UsageError               exit code 2
    |- RecordsError, SourceError, ModelError, UploadError, TrainingError
    |- ImageError
    |  `- BadImage
    |- CacheError
    |  `- CacheMismatch, FeaturesMissing, CacheCorrupt, DiskFull
    `- RunFolderError
       `- FolderInUse
    Stopped                     exit code 75: run the same command again

A message says what is wrong, the value, what is allowed, and the command to run next. Our own invariants are
plain `assert`s.

Errors of the operating system get their messages here too. An OSError names a path, often a temporary one, but not the
cause, which may be a folder above it. A full disk names no path at all, so code that writes files raises `NoRoom` (see
files.py). When memory runs out, the system only reports that, or kills a worker process.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from pathlib import Path

from lookonce.text import shell, size

TEMPORARY_MARK = ".tmp-"
"""What follows a file's own name in the name of a temporary file that will replace it."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""There is no room: on the disk, in the quota, or below the limit on the size of files."""
WHY_FULL = {errno.EDQUOT: "; `quota -s` shows the quota", errno.EFBIG: "; `ulimit -f` shows the limit"}
CODE_IN_TEXT = re.compile(r"\bos error ([0-9]{1,4})\b")
"""How libraries in Rust, such as safetensors, write the number of the system's error."""
NO_MEMORY = re.compile(
    "can't allocate memory|not enough memory|Cannot allocate memory|out of shared memory|failed to map segment|"
    "DataLoader worker .*(killed by signal|exited unexpectedly)|process pool was terminated abruptly|"
    "worker process .*was killed"
)
"""Messages of libraries that have no memory, or whose worker process was killed, as Linux does if none is left."""
LOST_RANK = re.compile(
    r"\bgloo/\S+\] .*(Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting)|"
    "remote process exited or there was a network error"
)
"""Messages of gloo and NCCL in the processes that are left when another one has ended or does not answer."""
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The system refused for lack of permission, or because the disk is read-only."""


class LookonceError(Exception):
    """An error that a user can fix."""

    exit_code = 1


class UsageError(LookonceError, ValueError):
    """The command line or the run file asks for something impossible."""

    exit_code = 2


class RecordsError(LookonceError, ValueError):
    """A records file is broken; names file and line."""


class SourceError(LookonceError):
    """A dataset cannot be downloaded or read."""


class ImageError(LookonceError):
    """An image is missing or cannot be read."""


class BadImage(ImageError):
    """An image file was read, and its bytes are not a usable image."""


class ModelError(LookonceError):
    """A model folder is incomplete, or an option does not fit the model."""


class UploadError(LookonceError):
    """The Hub refuses an upload, or cannot be reached."""


class CacheError(LookonceError):
    """A cache cannot be used."""


class CacheMismatch(CacheError):
    """A cache was built from another model or with other settings; names the fields."""


class FeaturesMissing(CacheError, KeyError):
    """A cache lacks the features of an image."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class CacheCorrupt(CacheError):
    """The bytes of a cache differ from what was written."""


class DiskFull(CacheError):
    """The disk has no room for a cache, a dataset or a run folder; names the missing bytes."""


class Stopped(BaseException):
    """A signal asked the process to stop before its work was finished.

    Like KeyboardInterrupt it is not an `Exception`: it is raised wherever the program is, and a library that catches
    exceptions there (torch.compile does) must not swallow it.
    """

    exit_code = 75


class TrainingError(LookonceError):
    """Training diverged, ran out of memory, cannot be captured, or is not exact; or its best checkpoint is damaged."""


class RunFolderError(LookonceError):
    """The output folder holds another run or other files."""


class FolderInUse(RunFolderError):
    """Another process uses the run folder."""


class NoRoom(OSError):
    """There is no room for a file; `needed` is its size as text, if that is known."""

    def __init__(self, code: int, path: Path, needed: str = "") -> None:
        super().__init__(code, os.strerror(code), str(path))
        self.needed = needed


def system_code(error: BaseException) -> int | None:
    """The number of the system's error, also of one that a library wraps; None if it is of another kind."""
    if isinstance(error, OSError):
        return error.errno
    match = CODE_IN_TEXT.search(str(error))
    return int(match[1]) if match else None


def full_disk_code(error: BaseException) -> int | None:
    """The system's code if an error means that there is no room; None if it means something else."""
    code = system_code(error)
    return code if code in FULL else None


def has_lost_rank(error: BaseException) -> bool:
    """Whether an error means that another rank has ended, so it is not the cause of the failure."""
    return isinstance(error, RuntimeError) and bool(LOST_RANK.search(str(error)))


def explain_system_error(error: BaseException) -> str | None:
    """An error of the system in words, also one that a library wraps: a path, a full disk, or no memory.

    None for all other errors.
    """
    if full_disk_code(error) is not None:
        return _no_room(error)
    message = "; ".join(filter(None, [str(error), *getattr(error, "__notes__", [])]))
    if isinstance(error, MemoryError) or NO_MEMORY.search(message):
        return _no_memory(message.strip().partition("\n")[0] or "a request was refused")
    return explain_os_error(error) if isinstance(error, OSError) else None


def explain_os_error(error: OSError) -> str:
    """An OSError in words: the file, and for a refusal the command that shows the permissions on the way to it."""
    if error.errno in FULL:
        return _no_room(error)
    path = target_of(error)
    if path is None:
        return error.strerror or str(error)
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and (file := _file_on_the_way(path)):
        return f"{file} is a file, and a folder of this name is needed; name another place, or move the file away"
    if error.errno not in REFUSALS:
        return f"{path}: {error.strerror}"
    return f"cannot open {path}: {error.strerror}; who may is shown by: namei -l {shell(path.absolute())}"


def _file_on_the_way(path: Path) -> Path | None:
    """The path itself, or what it lies below, if that is an ordinary file."""
    return next((part for part in (path, *path.parents) if part.is_file()), None)


def target_of(error: OSError) -> Path | None:
    """The file that an OSError is about, where a temporary name stands for the name that it would have got."""
    if not isinstance(error.filename, str | os.PathLike):
        return None
    path = Path(error.filename)
    names = [part.partition(TEMPORARY_MARK) for part in path.parts]
    temporary = next((number for number, (_, mark, _) in enumerate(names) if mark), None)
    return path if temporary is None else Path(*path.parts[:temporary], names[temporary][0])


def _no_room(error: BaseException) -> str:
    code = full_disk_code(error)
    assert code is not None
    path = target_of(error) if isinstance(error, OSError) else None
    needed = f"{error.needed} are needed, " if isinstance(error, NoRoom) and error.needed else ""
    folders = [path if path.is_dir() else path.parent] if path else [Path.cwd(), Path(tempfile.gettempdir())]
    free = ", ".join(f"{size(shutil.disk_usage(existing(folder)).free)} are free in {folder}" for folder in folders)
    return (
        f"no room{f' for {path}' if path else ''}: {os.strerror(code)}{WHY_FULL.get(code, '')} ({needed}{free}); make "
        "room, or name a folder on another disk, and run the same command again"
    )


def existing(folder: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    folder = folder.absolute()
    return folder if folder.exists() else existing(folder.parent)


def _no_memory(reason: str) -> str:
    import psutil  # slow to import

    memory = psutil.virtual_memory()
    return (
        f"out of memory: {reason}. {size(memory.available)} of this machine's {size(memory.total)} are free; a job, a "
        "container or a limit of the shell may allow less, and Linux kills processes that need more. End other "
        "programs, give it more memory, or lower what is in memory at once: batch.tokens_per_pack, "
        "batch.samples_per_forward, eval.tokens_per_batch, or the size of the input"
    )
