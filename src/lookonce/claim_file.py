"""Claim files: a running process reserves a shard or a folder with one, and other processes keep away.

Design: a claim file is created exclusively, so only one of several processes gets it. Its holder rewrites it every few
seconds (the heartbeat). A claim without a heartbeat for `expiry_s` seconds is dead, and so is one whose process has
ended on this machine; other processes may take over a dead claim. Ages are computed from file modification times alone,
so the clocks of the machines need not agree. There are no locks (unreliable on network filesystems).

A claim file is a hard link to a complete file, so it always names its holder. The holder keeps the file open: the claim
is still its own while the path leads to the same inode. A process that was suspended for longer than `expiry_s` may
have lost its claim, so it asks `is_held` before it writes what others may be writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import psutil
from pydantic import Field, TypeAdapter

from lookonce.environment import machine
from lookonce.files import naming_full_disk, read_json, temporary_name

IN_USE = "is in use by"
"""What stands in each message that another process holds a claim."""
EXPIRY_S = 180
"""Longer than network filesystems cache file times (60 s on NFS by default)."""
HEARTBEATS_PER_EXPIRY = 9
TICK_S = 2
"""The resolution of the coarsest filesystem clocks."""
CLAIM_BYTES = 1024
"""Every claim file is padded to this size, so that it can be rewritten in place."""

Content = TypeVar("Content")


@dataclass(frozen=True)
class Process:
    """A process, as its claim files and progress files describe it."""

    name: str
    """A name for people: "3/8", or host and process id."""
    host: str
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    machine: str
    """Distinguishes machines and containers that have the same host name."""
    born: float
    """When the process started, in seconds since the machine's boot, which setting the clock does not change. Process
    ids are reused; the pair of id and start is not."""
    job: str
    """The Slurm job with its array task and number of restarts; empty outside Slurm."""

    @classmethod
    def this(cls, name: str = "") -> Process:
        pid, host = os.getpid(), socket.gethostname()
        return cls(name or f"{host}:{pid}", host, pid, machine(), _start_time(pid), _job())

    def is_gone(self) -> bool:
        """Whether the process has ended: its own machine knows, and this job if Slurm has started it again since."""
        if _is_earlier(self.job, _job()):
            return True
        if self.machine != machine():
            return False
        try:
            is_zombie = psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
            return bool(is_zombie or abs(_start_time(self.pid) - self.born) > 1)
        except psutil.NoSuchProcess:
            return True


_PROCESS = TypeAdapter(Process)
"""Checks what a file says of a process: another program may have written it, or a disk may have damaged it."""


class ClaimFile:
    """A claim file that this process has created, and a thread that rewrites it several times in `expiry_s` seconds."""

    def __init__(self, path: Path, content: Mapping[str, Any], expiry_s: float = EXPIRY_S) -> None:
        """Create it; raises FileExistsError if another process was faster."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.content = path, content
        temporary = temporary_name(path)
        self._descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with naming_full_disk(path, CLAIM_BYTES):
                self._write()
                os.link(temporary, path)
        except OSError:
            os.close(self._descriptor)
            raise
        finally:
            temporary.unlink(missing_ok=True)
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._run, args=(expiry_s,), name="claim", daemon=True)
        self._heart.start()

    @classmethod
    def take(cls, path: Path, content: Any, expiry_s: float) -> Self | None:
        """Create it, in place of a dead one; None if a living process holds it."""
        if path.exists() and not remove_if_dead(path, expiry_s):
            return None
        with contextlib.suppress(FileExistsError):  # another process was faster
            return cls(path, content, expiry_s)
        return None

    def _run(self, expiry_s: float) -> None:
        while not self._ended.wait(expiry_s / HEARTBEATS_PER_EXPIRY):
            with contextlib.suppress(OSError):  # a disk that is full now may have room at the next heartbeat
                self.beat()

    def beat(self) -> None:
        """Rewrite the file in place: the heartbeat."""
        self._write()

    def _write(self) -> None:
        os.pwrite(self._descriptor, json.dumps(self.content).encode()[:CLAIM_BYTES].ljust(CLAIM_BYTES), 0)
        os.fsync(self._descriptor)  # network filesystems delay writes, and the modification time with them

    def is_held(self) -> bool:
        try:
            return os.stat(self.path).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        self._ended.set()
        self._heart.join()
        if self.is_held():
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class FolderClaim:
    """A claim on a folder, once `take` has got it; a context manager that releases it."""

    def __init__(self, path: Path, command: str, expiry_s: float = EXPIRY_S) -> None:
        """`path` is the claim file; `command` says what the process does: "lookonce train"."""
        self.path, self.expiry_s = path, expiry_s
        self._content = {"worker": asdict(Process.this()), "command": command, "started": time.time()}
        self._file: ClaimFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.release()
        self._file = None

    def take(self) -> str:
        """Take the claim; if a living process holds it, returns which; raises OSError if it cannot be written."""
        self._file = ClaimFile.take(self.path, self._content, self.expiry_s)
        return "" if self._file else holder(self.path, self.expiry_s)

    def is_lost(self) -> bool:
        """Whether another process has taken over what this one had taken."""
        if self._file is None or self._file.is_held():
            return False
        try:  # on some filesystems a hard link has another inode
            return bool(read_json(self.path) != self._content)
        except (FileNotFoundError, ValueError):
            return True

    def release_moved(self, path: Path) -> None:
        """Release the claim, whose file has moved to `path` with its folder."""
        assert self._file
        self._file.path = path
        self._file.release()
        self._file = None


def holder(path: Path, expiry_s: float) -> str:
    """The process that holds a claim file, for a message, and when its claim ends if it was killed."""
    try:
        content = read_json(path)
        process = _PROCESS.validate_python(content["worker"])
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(content.get("started", 0)))
        silent_s = age(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return "a process whose claim file cannot be read"
    job = f", job {process.job}" if process.job else ""
    text = f"`{content.get('command', 'lookonce')}`: process {process.pid} on {process.host}{job}, since {since}"
    if process.machine == machine():
        return text
    return (
        f"{text} (last sign of life {silent_s:.0f} s ago; if it was killed, others may take over after {expiry_s:g} s)"
    )


def remove_if_dead(path: Path, expiry_s: float) -> bool:
    """Remove a claim file if it is dead; False if it is not."""
    try:
        seen = path.stat()
        if not is_dead(path, expiry_s):
            return False
        renamed = temporary_name(path)
        os.rename(path, renamed)
        now = renamed.stat()  # the number of an inode alone may be reused at once
        if (now.st_ino, now.st_mtime_ns) != (seen.st_ino, seen.st_mtime_ns):  # another process took it over: restore it
            with contextlib.suppress(FileExistsError):
                os.link(renamed, path)
        renamed.unlink()
    except FileNotFoundError:  # released meanwhile, or another process removed the renamed file
        pass
    return True


def is_dead(path: Path, expiry_s: float) -> bool:
    """Whether the holder of a claim file has ended, or the last heartbeat is older than `expiry_s`."""
    process = read_process_file(path, lambda worker, **_: worker)
    return (process is not None and process.is_gone()) or age(path) > expiry_s


def is_living(path: Path, expiry_s: float) -> bool:
    """Whether there is a claim file and a living process holds it."""
    try:
        return not is_dead(path, expiry_s)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_process_file(path: Path, make: Callable[..., Content]) -> Content | None:
    """What `make` returns for the keys of a JSON file, one of which is `worker`; None if missing or unreadable."""
    try:
        value = read_json(path)
        return make(**value | {"worker": _PROCESS.validate_python(value["worker"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def age(path: Path) -> float:
    """Seconds since a file was modified, by the filesystem's clock.

    A time in the future, by which a dead claim would last as long as that clock was ahead, is set to now: a living
    holder writes its own at the next heartbeat.
    """
    pulse = temporary_name(path.parent / "pulse")
    try:
        pulse.touch()
        seconds = pulse.stat().st_mtime - path.stat().st_mtime
        if seconds < -TICK_S:
            os.utime(path)
        return max(seconds, 0.0)
    except FileNotFoundError:
        raise
    except OSError:  # a read-only folder or a full disk
        return max(time.time() - path.stat().st_mtime, 0.0)
    finally:
        with contextlib.suppress(OSError):
            pulse.unlink()


def _start_time(pid: int) -> float:
    boot_time = psutil.boot_time()
    return float(psutil.Process(pid).create_time() - boot_time)


def _job() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    return f"{job} (restart {restarts})" if job and restarts else job


def _is_earlier(job: str, mine: str) -> bool:
    """Whether `job` is an earlier start of the Slurm job `mine`; Slurm starts a job again when it has ended."""
    (name, restarts), (my_name, my_restarts) = _restarts(job), _restarts(mine)
    return bool(name) and name == my_name and restarts < my_restarts


def _restarts(job: str) -> tuple[str, int]:
    name, _, number = job.rstrip(")").partition(" (restart ")
    return name, int(number) if number.isdecimal() else 0
