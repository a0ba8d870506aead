"""Claims: which worker is building which shard, without a coordinator.

Design: a claim is a small file that is created exclusively, so only one of several workers gets the shard. Its holder
rewrites it every few seconds (the heartbeat). A claim without a heartbeat for `expiry_s` seconds is dead, and so is one
whose process has ended on this machine; other workers may take over a dead claim. Ages are computed from file
modification times alone, so the clocks of the machines need not agree. Correctness does not depend on claims: if two
workers build the same shard, because one was suspended for longer than `expiry_s`, they build the same features, and
one of them writes the receipt. There are no locks (unreliable on network filesystems), no database and no messages.

A claim is created by a hard link from a complete file, so it always names its holder, whenever that is killed. The
holder keeps the file open: the claim is still its own while the path leads to the same inode.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from lookonce.environment import machine
from lookonce.files import temporary_name

CLAIMS = "claims"
EXPIRY_S = 180
"""Longer than network filesystems cache file times (60 s on NFS by default)."""
HEARTBEATS_PER_EXPIRY = 9
HANG_S = 1800
"""A worker without progress for this long counts as hanging: its heartbeats stop, and others may take over."""
CLAIM_BYTES = 1024
"""Every claim is padded to this size, so that it can be rewritten in place."""

Content = TypeVar("Content")


@dataclass(frozen=True)
class Worker:
    """A process, as its claims and progress files describe it."""

    name: str
    """A name for people: "3/8", or host and process id."""
    host: str
    pid: int
    machine: str
    """Distinguishes machines and containers that have the same host name."""
    born: float
    """When the process started, in seconds since the machine's boot, which setting the clock does not change. Process
    ids are reused; the pair of id and start is not."""
    job: str
    """The Slurm job with its array task and number of restarts; empty outside Slurm."""

    @classmethod
    def this_process(cls, name: str = "") -> Worker:
        pid = os.getpid()
        return cls(
            name or f"{socket.gethostname()}:{pid}",
            socket.gethostname(),
            pid,
            machine(),
            _born(pid),
            _job(),
        )

    def is_gone(self) -> bool:
        """Whether the process has certainly ended; only its own machine can know, elsewhere this is False."""
        if self.machine != machine():
            return False
        try:
            is_zombie = psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
            return bool(is_zombie or abs(_born(self.pid) - self.born) > 1)
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True)
class Work:
    """What a claim file holds: a shard, the worker that builds it, and its progress."""

    shard: str
    worker: Worker
    phase: str = "starting"
    num_done: int = 0
    num_images: int = 0
    started: float = 0.0
    """When the worker took the shard, in seconds since 1970 by its clock."""


class Claim:
    """The claim of a shard that this worker holds, as `Claims.take` returns it."""

    def __init__(self, path: Path, descriptor: int, work: Work) -> None:
        self._path, self._descriptor, self.work = path, descriptor, work
        self._progressed = time.monotonic()
        self.beat()

    def update(self, phase: str, num_done: int) -> None:
        """Record progress, which also shows that this worker does not hang."""
        self._progressed = time.monotonic()
        self.work = replace(self.work, phase=phase, num_done=num_done)

    def beat(self) -> None:
        """Rewrite the claim file, unless this worker hangs."""
        if time.monotonic() - self._progressed < HANG_S:
            content = json.dumps(asdict(self.work)).encode()[:CLAIM_BYTES]
            os.pwrite(self._descriptor, content.ljust(CLAIM_BYTES), 0)
            os.fsync(self._descriptor)  # network filesystems delay writes, and the modification time with them

    def is_held(self) -> bool:
        """Whether this worker still holds the claim."""
        try:
            return os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self.is_held():
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Claims:
    """The claims of a cache, used by one worker; a context manager that sends the heartbeats of its own."""

    def __init__(self, folder: Path, worker: Worker, expiry_s: float = EXPIRY_S) -> None:
        self.folder, self.worker, self.expiry_s = folder / CLAIMS, worker, expiry_s
        self._held: set[Claim] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for claim in tuple(self._held):
            self.release(claim)

    def take(self, shard: str, num_images: int) -> Claim | None:
        """Claim a shard, taking over a dead claim; None if another worker holds it."""
        path = self.folder / f"{shard}.json"
        if path.exists() and not remove_if_dead(path, self.expiry_s):
            return None
        try:
            claim = self._create(path, Work(shard, self.worker, num_images=num_images, started=time.time()))
        except FileExistsError:  # another worker was faster
            return None
        with self._lock:
            self._held.add(claim)
        return claim

    def release(self, claim: Claim) -> None:
        with self._lock:
            self._held.discard(claim)
            claim.release()

    def _create(self, path: Path, work: Work) -> Claim:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            claim = Claim(path, descriptor, work)
            os.link(temporary, path)
        except OSError:
            os.close(descriptor)
            raise
        finally:
            temporary.unlink(missing_ok=True)
        return claim

    def _beat(self) -> None:
        while not self._ended.wait(self.expiry_s / HEARTBEATS_PER_EXPIRY):
            with self._lock:
                for claim in self._held:
                    with contextlib.suppress(OSError):  # a disk that is full now may have room at the next heartbeat
                        claim.beat()


def remove_if_dead(path: Path, expiry_s: float) -> bool:
    """Remove a claim if it is dead; False if it is not."""
    try:
        seen = path.stat()
        if not is_dead(path, expiry_s):
            return False
        renamed = temporary_name(path)
        os.rename(path, renamed)
        if _identity(renamed.stat()) != _identity(seen):  # another worker took it over meanwhile: restore it
            with contextlib.suppress(FileExistsError):
                os.link(renamed, path)
        renamed.unlink()
    except FileNotFoundError:  # released meanwhile, or another process removed the renamed file
        pass
    return True


def read_work(path: Path) -> Work | None:
    """The content of a claim; None if it is missing or unreadable."""
    return read_worker_file(path, Work)


def read_worker_file(path: Path, make: Callable[..., Content]) -> Content | None:
    """What `make` returns for the keys of a JSON file, one of which is `worker`; None if missing or unreadable."""
    try:
        value = json.loads(path.read_text())
        return make(**value | {"worker": Worker(**value["worker"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_dead(path: Path, expiry_s: float) -> bool:
    """Whether the holder of a claim has ended, or the last heartbeat is older than `expiry_s`."""
    work = read_work(path)
    return (work is not None and work.worker.is_gone()) or age(path) > expiry_s


def age(path: Path) -> float:
    """Seconds since a file was modified, by the filesystem's clock."""
    pulse = temporary_name(path.parent / "pulse")
    try:
        pulse.touch()
        return pulse.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        raise
    except OSError:  # a read-only folder or a full disk
        return time.time() - path.stat().st_mtime
    finally:
        with contextlib.suppress(OSError):
            pulse.unlink()


def claimed_work(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[tuple[Work, float, bool]]:
    """The claims of a cache: content of each, seconds since its heartbeat, and whether it is alive."""
    for path in sorted((folder / CLAIMS).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            work = read_work(path) or Work(path.stem, Worker("unknown", "", 0, "", 0.0, ""))
            yield work, age(path), not is_dead(path, expiry_s)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    """Identifies a file. The inode alone does not: its number may be reused at once."""
    return stat.st_ino, stat.st_mtime_ns


def _born(pid: int) -> float:
    boot_time = psutil.boot_time()
    return float(psutil.Process(pid).create_time() - boot_time)


def _job() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    return f"{job} (restart {restarts})" if job and restarts else job
