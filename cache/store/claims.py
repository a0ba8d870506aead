"""Claims: which worker has which shard in work, without a coordinator.

Design: a claim is a small file that is created exclusively, so of several workers one gets the shard. Its holder
touches it every few seconds; a claim that nobody has touched for `expiry` seconds, or whose process is gone from this
very machine, is dead and may be taken over. Time is the filesystem's own (a file's modification time against that of
another), so machines need not agree on the hour. Nothing depends on a claim being right: should two workers make one
shard after all, because one was asleep for longer than `expiry`, both make the same and the receipt is one of theirs.
No locks (unreliable on network filesystems), no database, no messages.

A claim appears whole, by a hard link, so that whenever its holder is killed, it says whose it was. Then its holder
writes it in place and keeps it open, so that "is it still mine" is "is this still my file".
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from lookonce.environment import machine
from lookonce.files import temporary_name

CLAIMS = "claims"
EXPIRY_S = 180
"""Longer than network filesystems keep a file's times to themselves (60 s on NFS by default)."""
BEATS_PER_EXPIRY = 9
STANDSTILL_S = 1800
"""A worker that has encoded nothing for so long stops touching its claims: it hangs, and others may take over."""
RECORD_BYTES = 1024


@dataclass(frozen=True)
class Worker:
    """A process that makes shards, as its claims describe it."""

    name: str
    """For people: "3/8", or the process's number."""
    host: str
    pid: int
    machine: str
    """Tells processes that see each other from those that merely have the same host name and number."""
    born: float
    """When the process began, in seconds since its machine did, which setting the clock does not change: numbers of
    processes are used again."""
    job: str
    """Of Slurm, with the task in an array and how often it was restarted; empty elsewhere."""

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
        """Whether the process has certainly ended, which only its own machine can tell."""
        if self.machine != machine():
            return False
        try:
            is_zombie = psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
            return bool(is_zombie or abs(_born(self.pid) - self.born) > 1)
        except psutil.NoSuchProcess:
            return True


@dataclass(frozen=True)
class Work:
    """What a worker says of a shard in work."""

    shard: str
    worker: Worker
    phase: str = "starting"
    num_done: int = 0
    num_images: int = 0
    started: float = 0.0
    """Seconds since 1970, by the worker's clock."""


class Claim:
    """A shard that is this worker's; `Claims.take` gives it."""

    def __init__(self, path: Path, descriptor: int, work: Work) -> None:
        self._path, self._descriptor, self.work = path, descriptor, work
        self._moved = time.monotonic()
        self.beat()

    def update(self, phase: str, num_done: int) -> None:
        """Say how far it is; also the proof that this worker does not hang."""
        self._moved = time.monotonic()
        self.work = replace(self.work, phase=phase, num_done=num_done)

    def beat(self) -> None:
        """Touch the claim, unless the worker hangs."""
        if time.monotonic() - self._moved < STANDSTILL_S:
            record = json.dumps(asdict(self.work)).encode()[:RECORD_BYTES]
            os.pwrite(self._descriptor, record.ljust(RECORD_BYTES), 0)
            os.fsync(self._descriptor)  # network filesystems keep writes back, and the time with them

    def is_held(self) -> bool:
        """Whether it is still this worker's."""
        try:
            return os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self.is_held():
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Claims:
    """The claims in a cache folder, seen by one worker; a context manager that keeps its own alive."""

    def __init__(self, folder: Path, worker: Worker, expiry_s: float = EXPIRY_S) -> None:
        self.folder, self.worker, self.expiry_s = folder / CLAIMS, worker, expiry_s
        self._held: set[Claim] = set()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="claims", daemon=True)

    def __enter__(self) -> Claims:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._heart.join()
        for claim in tuple(self._held):
            self.release(claim)

    def take(self, shard: str, num_images: int) -> Claim | None:
        """Claim a shard, taking over a dead worker's claim; None if another is at it."""
        path = self.folder / f"{shard}.json"
        if path.exists() and not bury(path, self.expiry_s):
            return None
        try:
            claim = self._create(path, Work(shard, self.worker, num_images=num_images, started=time.time()))
        except FileExistsError:  # another was faster
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
        while not self._ended.wait(self.expiry_s / BEATS_PER_EXPIRY):
            with self._lock:
                for claim in self._held:
                    with contextlib.suppress(OSError):  # a disk that is full now may not be at the next beat
                        claim.beat()


def bury(path: Path, expiry_s: float) -> bool:
    """Remove a claim if it is dead; False if it is not."""
    try:
        seen = path.stat()
        if not is_dead(path, expiry_s):
            return False
        grave = temporary_name(path)
        os.rename(path, grave)
        if _identity(grave.stat()) != _identity(seen):  # another took it over since we looked: give it back
            with contextlib.suppress(FileExistsError):
                os.link(grave, path)
        grave.unlink()
    except FileNotFoundError:  # released meanwhile, or another cleared the grave away
        pass
    return True


def read_work(path: Path) -> Work | None:
    """What a claim says; None if it can not be read."""
    try:
        value = json.loads(path.read_text())
        return Work(**value | {"worker": Worker(**value["worker"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_dead(path: Path, expiry_s: float) -> bool:
    """Whether a claim's holder is gone, or has not touched it for `expiry_s`."""
    work = read_work(path)
    return (work is not None and work.worker.is_gone()) or age(path) > expiry_s


def age(path: Path) -> float:
    """Seconds since a file was touched, by the filesystem's clock."""
    pulse = temporary_name(path.parent / "pulse")
    try:
        pulse.touch()
        return pulse.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        raise
    except OSError:  # a folder that we may only look at, or a disk that is full
        return time.time() - path.stat().st_mtime
    finally:
        with contextlib.suppress(OSError):
            pulse.unlink()


def works(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[tuple[Work, float, bool]]:
    """The claims of a cache: what each says, seconds since it was touched, and whether its worker lives."""
    for path in sorted((folder / CLAIMS).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            work = read_work(path) or Work(path.stem, Worker("unknown", "", 0, "", 0.0, ""))
            yield work, age(path), not is_dead(path, expiry_s)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    """Of a file: numbers of inodes are used again, often at once."""
    return stat.st_ino, stat.st_mtime_ns


def _born(pid: int) -> float:
    boot_time = psutil.boot_time()
    return float(psutil.Process(pid).create_time() - boot_time)


def _job() -> str:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    restarts = os.environ.get("SLURM_RESTART_COUNT")
    return f"{job} (restart {restarts})" if job and restarts else job
