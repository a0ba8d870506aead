"""Who uses a cache: the claims of workers and commands, the runs that read it, and what killed processes left behind.

Design: a shard is claimed by the worker that builds it, so workers need no coordinator. Correctness does not depend on
these claims: if two workers build the same shard, because one was suspended for longer than `expiry_s`, they build the
same features, and one of them writes the receipt.

Repair and garbage collection *own* a cache; every other command that writes or reads for long *uses* it, beside any
number of others. Both write their claim file first and then look for those of the other kind, in the same folder, so of
two that start at once at least one sees the other and is refused.

Garbage collection keeps what a run needs: training writes a note when it opens the cache, which counts while the run
folder exists and is not empty, so a killed run has nothing to clean up. A run folder on another machine may be on that
machine's own disk; if it is not visible here, the note counts for 30 days.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from lookonce.cache.store.metadata import finished_shards
from lookonce.cache.store.shards import SHARDS
from lookonce.claim_file import (
    EXPIRY_S,
    IN_USE,
    ClaimFile,
    FolderClaim,
    Process,
    age,
    holder,
    is_dead,
    is_living,
    read_process_file,
    remove_if_dead,
)
from lookonce.errors import CacheError
from lookonce.files import SCRATCH, TEMPORARY_MARK, read_json, write_json, writer_host

CLAIMS = "claims"
OWNER = "owner.json"
HANG_S = 1800
"""A worker without progress for this long counts as hanging: its heartbeats stop, and others may take over."""
USES = "uses"
UNSEEN_S = 30 * 24 * 3600
"""How long a note counts if its run folder is not visible and another machine wrote it."""
LeftoverKind = Literal["temporary file", "dead claim", "unfinished shard"]
SCRATCH_EXPIRY_S = 3600
"""Long enough for a measurement to load its models between two writes."""
SCRATCH_NAME = re.compile(rf"{SCRATCH}[a-z]+{re.escape(TEMPORARY_MARK)}(.+-\d+-[a-z0-9_]{{8}})")


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

    def __init__(self, path: Path, work: Work, expiry_s: float) -> None:
        self.work = work
        self._progressed = time.monotonic()
        super().__init__(path, asdict(work), expiry_s)

    def update(self, num_done: int) -> None:
        """Record progress, which also shows that this worker does not hang."""
        self._progressed = time.monotonic()
        self.work = replace(self.work, phase="encoding", num_done=num_done)

    def beat(self) -> None:
        """Rewrite the claim file, unless this worker hangs."""
        if time.monotonic() - self._progressed < HANG_S:
            self.content = asdict(self.work)
            super().beat()


class Claims:
    """The claims of a cache's shards that one worker holds; a context manager that releases them."""

    def __init__(self, folder: Path, worker: Process, expiry_s: float = EXPIRY_S) -> None:
        self.folder, self.worker, self.expiry_s = folder / CLAIMS, worker, expiry_s
        self.held: dict[str, Claim] = {}

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        for claim in tuple(self.held.values()):
            self.release(claim)

    def take(self, shard: str, num_images: int) -> Claim | None:
        """Claim a shard, taking over a dead claim; None if another worker holds it."""
        work = Work(shard, self.worker, num_images=num_images, started=time.time())
        claim = Claim.take(self.folder / f"{shard}.json", work, self.expiry_s)
        if claim:
            self.held[shard] = claim
        return claim

    def release(self, claim: Claim) -> None:
        self.held.pop(claim.work.shard, None)
        claim.release()


@contextlib.contextmanager
def using(folder: Path, command: str, expiry_s: float = EXPIRY_S, *, name: str = "") -> Iterator[None]:
    """Use a cache within the block, beside other users; a folder that cannot be written to needs no claim file.

    Of several processes that use it under one `name`, the first is let in.

    Raises:
        CacheError: another process owns it, or uses it under this name.
    """
    with FolderClaim(folder / CLAIMS / f"user-{name or uuid.uuid4().hex}.json", command, expiry_s) as claim:
        with contextlib.suppress(OSError):
            if claim.take():
                raise _in_use(folder, claim.path, expiry_s)
        owner = folder / CLAIMS / OWNER
        if is_living(owner, expiry_s):
            raise _in_use(folder, owner, expiry_s)
        yield


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


def claimed_work(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[tuple[Work, float, bool]]:
    """The claimed shards of a cache: content of each claim, seconds since its heartbeat, and whether it is alive."""
    for path in sorted((folder / CLAIMS).glob("shard-*.json")):
        with contextlib.suppress(FileNotFoundError):
            work = read_process_file(path, Work) or Work(path.stem, Process("unknown", "", 0, "", 0.0, ""))
            yield work, age(path), not is_dead(path, expiry_s)


@dataclass(frozen=True)
class Use:
    """A run that has opened a cache."""

    run: str
    """The absolute path of the run folder."""
    host: str
    time: float
    """When the run last opened the cache, in seconds since 1970."""


def note_use(folder: Path, run_folder: Path) -> None:
    """Note in a cache folder that a run reads it; does nothing if the folder is read-only."""
    use = Use(str(run_folder.absolute()), socket.gethostname(), round(time.time(), 3))
    name = hashlib.sha256(use.run.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        write_json(folder / USES / f"{name}.json", asdict(use))


def uses(folder: Path) -> list[Use]:
    """The uses of a cache whose run folder still exists, sorted by that folder."""
    in_use = []
    for path in (folder / USES).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # removed or broken: not a use
            use = Use(**read_json(path))
            if Path(use.run).exists():
                is_used = any(Path(use.run).iterdir())
            else:
                is_used = use.host != socket.gethostname() and time.time() - use.time < UNSEEN_S
            in_use += [use] if is_used else []
    return sorted(in_use, key=lambda use: use.run)


def leftovers(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[tuple[Path, LeftoverKind]]:
    """What killed processes left in a cache.

    A temporary file whose process has ended on this machine, or that was not written to for longer than a claim lasts;
    a claim whose worker is dead; a shard without a receipt that no living worker has claimed.
    """
    claimed = {work.shard for work, _, alive in claimed_work(folder, expiry_s) if alive}
    for path in sorted(folder.rglob(f"*{TEMPORARY_MARK}*")):
        name, _, writer = path.name.partition(TEMPORARY_MARK)
        if path.is_dir() or (path.parent.name == SHARDS and name.split(".")[0] in claimed):
            continue
        with contextlib.suppress(FileNotFoundError):
            if _has_ended(writer) or age(path) > expiry_s:
                yield path, "temporary file"
    for path in sorted((folder / CLAIMS).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            if is_dead(path, expiry_s):
                yield path, "dead claim"
    known = claimed.union(finished_shards(folder))
    for path in sorted((folder / SHARDS).glob("*.safetensors")):
        if path.stem not in known:
            yield path, "unfinished shard"


def scratch_folders(root: Path) -> Iterator[Path]:
    """Scratch folders below a folder of caches whose process has ended or wrote nothing for `SCRATCH_EXPIRY_S`."""
    for path in sorted(root.glob(f"{SCRATCH}*")):
        name = SCRATCH_NAME.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                times = [file.lstat().st_mtime for file in (path, *path.rglob("*"))]
                if _has_ended(name[1]) or age(path) - (max(times) - times[0]) > SCRATCH_EXPIRY_S:
                    yield path


def sweep(folder: Path, expiry_s: float = EXPIRY_S) -> None:
    """Remove the temporary files and claims of dead workers."""
    for path, kind in leftovers(folder, expiry_s):
        if kind != "unfinished shard":
            remove_leftover(path, kind, expiry_s)


def remove_leftover(path: Path, kind: LeftoverKind, expiry_s: float) -> None:
    """Remove a leftover, but for a claim that another process has taken over."""
    if kind == "dead claim":
        remove_if_dead(path, expiry_s)
    else:
        path.unlink(missing_ok=True)


def _has_ended(writer: str) -> bool:
    """Whether the process in a temporary name (HOST-PID-RANDOM) ran on this machine and has ended."""
    host, _, pid = writer.rpartition("-")[0].rpartition("-")
    return host == writer_host() and pid.isdigit() and not psutil.pid_exists(int(pid))
