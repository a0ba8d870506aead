"""The claim files of a cache: which worker is building which shard, and which processes use the whole cache.

Design: a shard is claimed by the worker that builds it, so workers need no coordinator. Correctness does not depend on
these claims: if two workers build the same shard, because one was suspended for longer than `expiry_s`, they build the
same features, and one of them writes the receipt.

What removes files needs the cache for itself: repair and garbage collection *own* it, every other command that writes
or reads for long *uses* it, together with any number of others. Both write their claim file first and then look for
those of the other kind, in the same folder, so of two that start at once at least one sees the other and is refused.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lookonce.claim_file import (
    EXPIRY_S,
    IN_USE,
    ClaimFile,
    FolderClaim,
    Heart,
    Process,
    age,
    holder,
    is_dead,
    is_living,
    read_process_file,
    remove_if_dead,
)
from lookonce.errors import CacheError

CLAIMS = "claims"
OWNER = "owner.json"
HANG_S = 1800
"""A worker without progress for this long counts as hanging: its heartbeats stop, and others may take over."""


@dataclass(frozen=True)
class Work:
    """What the claim file of a shard holds: the shard, the worker that builds it, and its progress."""

    shard: str
    worker: Process
    phase: str = "starting"
    num_done: int = 0
    num_images: int = 0
    started: float = 0.0
    """When the worker took the shard, in seconds since 1970 by its clock."""


class Claim(ClaimFile):
    """The claim of a shard that this worker holds, as `Claims.take` returns it."""

    def __init__(self, path: Path, work: Work) -> None:
        self.work = work
        self._progressed = time.monotonic()
        super().__init__(path, asdict(work))

    def update(self, phase: str, num_done: int) -> None:
        """Record progress, which also shows that this worker does not hang."""
        self._progressed = time.monotonic()
        self.work = replace(self.work, phase=phase, num_done=num_done)

    def beat(self) -> None:
        """Rewrite the claim file, unless this worker hangs."""
        if time.monotonic() - self._progressed < HANG_S:
            self.write(asdict(self.work))


class Claims:
    """The claims of a cache's shards, used by one worker; a context manager that sends the heartbeats of its own."""

    def __init__(self, folder: Path, worker: Process, expiry_s: float = EXPIRY_S) -> None:
        self.folder, self.worker, self.expiry_s = folder / CLAIMS, worker, expiry_s
        self._held: set[Claim] = set()
        self._lock = threading.Lock()
        self._heart = Heart(self._beat, expiry_s)

    def __enter__(self) -> Claims:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heart.stop()
        for claim in tuple(self._held):
            self.release(claim)

    def take(self, shard: str, num_images: int) -> Claim | None:
        """Claim a shard, taking over a dead claim; None if another worker holds it."""
        path = self.folder / f"{shard}.json"
        if path.exists() and not remove_if_dead(path, self.expiry_s):
            return None
        try:
            claim = Claim(path, Work(shard, self.worker, num_images=num_images, started=time.time()))
        except FileExistsError:  # another worker was faster
            return None
        with self._lock:
            self._held.add(claim)
        return claim

    def release(self, claim: Claim) -> None:
        with self._lock:
            self._held.discard(claim)
            claim.release()

    def _beat(self) -> None:
        with self._lock:
            for claim in self._held:
                with contextlib.suppress(OSError):  # as in `Heart`, for each claim
                    claim.beat()


@contextlib.contextmanager
def using(folder: Path, command: str, expiry_s: float = EXPIRY_S) -> Iterator[None]:
    """Use a cache within the block, beside other users; a folder that cannot be written to needs no claim file.

    Raises:
        CacheError: another process owns it.
    """
    with FolderClaim(folder / CLAIMS / f"user-{uuid.uuid4().hex}.json", command, expiry_s) as claim:
        with contextlib.suppress(OSError):
            claim.take()
        owner = folder / CLAIMS / OWNER
        if is_living(owner, expiry_s):
            raise _in_use(folder, owner, expiry_s)
        yield


class Uses(contextlib.ExitStack):
    """Uses of caches, as by `using`, from the call with each folder until the end of the block."""

    def __init__(self, command: str, expiry_s: float = EXPIRY_S) -> None:
        super().__init__()
        self._command, self._expiry_s = command, expiry_s

    def __call__(self, folder: Path) -> None:
        """Use a cache, if there is one; raises CacheError if another process owns it."""
        if folder.is_dir():
            self.enter_context(using(folder, self._command, self._expiry_s))


@contextlib.contextmanager
def owning(folder: Path, command: str, expiry_s: float = EXPIRY_S) -> Iterator[Callable[[], None]]:
    """Own a cache within the block: no other process of ours uses it. Yields what to call before each change.

    Raises:
        CacheError: another process uses it, or owns it; the yielded function: it has taken over.
    """
    with FolderClaim(folder / CLAIMS / OWNER, command, expiry_s) as claim:
        if claim.take():
            raise _in_use(folder, claim.path, expiry_s)
        for path in sorted((folder / CLAIMS).glob("*.json")):
            if path.name != OWNER and is_living(path, expiry_s):
                raise _in_use(folder, path, expiry_s)

        def check() -> None:
            if claim.is_lost():
                raise CacheError(f"another process has taken over {folder} while this one was suspended; run it again")

        yield check


def _in_use(folder: Path, path: Path, expiry_s: float) -> CacheError:
    return CacheError(f"the cache {folder} {IN_USE} {holder(path, expiry_s)}; wait until it has ended, or stop it")


def read_work(path: Path) -> Work | None:
    """The content of a shard's claim; None if it is missing or unreadable."""
    return read_process_file(path, Work)


def claimed_work(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[tuple[Work, float, bool]]:
    """The claimed shards of a cache: content of each claim, seconds since its heartbeat, and whether it is alive."""
    for path in sorted((folder / CLAIMS).glob("shard-*.json")):
        with contextlib.suppress(FileNotFoundError):
            work = read_work(path) or Work(path.stem, Process("unknown", "", 0, "", 0.0, ""))
            yield work, age(path), not is_dead(path, expiry_s)
