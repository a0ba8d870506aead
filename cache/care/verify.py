"""Whether a cache is what was written: the report behind `cache verify`.

Design: everything in a cache folder that features depend on is under a checksum: each receipt and each part of the plan
carries its own, the manifest that of the fingerprint, and receipts those of every byte of every shard. `quick` reads
receipts and headers and asks for sizes: a lost, truncated or swapped file is found, in about a second for 10,000
shards. `full` reads every byte, as fast as the disk gives them. All problems are told, not only the first.

Not under a checksum, because no feature depends on it: the manifest's provenance, the summary in `quarantine.jsonl`,
claims and notes of use. A broken index is no damage: readers take the receipts instead.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from lookonce.cache.care.checks import NUM_THREADS, Problem, Take, check_shard, ignore
from lookonce.cache.care.salvage import shard_number
from lookonce.cache.names import REPAIR_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.folder import BROKEN, MANIFEST, plan_path, read_manifest, read_plan
from lookonce.cache.store.index import INDEX, read_index
from lookonce.cache.store.plan import Plan
from lookonce.cache.store.receipts import Receipt, finished_shards, read_receipt
from lookonce.cache.store.shards import SHARDS
from lookonce.errors import CacheCorrupt
from lookonce.text import count, duration, size

Level = Literal["quick", "full"]
NUM_TRIED, SLOW_S = 16, 1e-3
"""A disk is slow if the first few shards took longer than this to look at."""
NUM_NAMED = 20
"""How many problems a report shows as text."""


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at, and all that is wrong."""

    folder: Path
    level: Level
    num_shards: int
    """Finished ones."""
    num_images: int
    size_bytes: int
    read_bytes: int
    problems: list[Problem]
    unfinished: list[str]
    """Shards that were begun or planned and have no receipt: work to do, no damage."""
    index: Literal["current", "none", "not used"]
    """Whether readers find the index file of use; if not, they read the receipts."""
    seconds: float

    def text(self) -> str:
        lines = [f"cache {self.folder}: {self._found()}; {self._looked()}"]
        lines += [f"  {problem.text()}" for problem in self.problems[:NUM_NAMED]]
        if len(self.problems) > NUM_NAMED:
            lines.append(f"  and {len(self.problems) - NUM_NAMED:,} more (--json has them all)")
        if self.unfinished:
            lines.append(f"{count(len(self.unfinished), 'shard')} unfinished: {named(self.unfinished)}")
        if self.index == "not used":
            lines.append("the index does not fit the receipts and is not used; the next build makes it anew")
        if self.problems:
            lines.append(f"mend it with: {REPAIR_COMMAND}")
        return "\n".join(lines)

    def _found(self) -> str:
        content = f"{count(self.num_images, 'image')} in {count(self.num_shards, 'shard')}, {size(self.size_bytes)}"
        if not self.problems:
            return f"{content}, {'whole' if self.level == 'full' else 'nothing wrong'}"
        where = f" in {count(len(self.damaged), 'shard')}" if self.damaged else ""
        return f"{content}, {count(len(self.problems), 'problem')}{where}"

    def _looked(self) -> str:
        what = {"quick": "receipts, headers and sizes checked", "full": "every byte checked"}[self.level]
        rate = f", {size(self.read_bytes / self.seconds)}/s" if self.level == "full" and self.seconds else ""
        return f"{what} in {duration(self.seconds)}{rate}"

    @property
    def damaged(self) -> list[str]:
        """The shards with problems."""
        return list(dict.fromkeys(problem.shard for problem in self.problems if problem.shard))


def verify(folder: Path, level: Level = "full") -> VerifyReport:
    """Compare a cache with its checksums; never writes to it.

    Raises:
        CacheError: the folder is no cache, or of a format that this version does not read.
    """
    start = time.perf_counter()
    fingerprint, problems = check_manifest(folder)
    names = finished_shards(folder)
    plan, broken = check_plan(folder, names)
    problems += broken
    num_images = size_bytes = 0
    with _Progress(folder, names, level) as progress:
        pending = Pending(folder, plan, names)
        check = _Check(folder, fingerprint, level, progress, pending)
        for checked in _each(check, names, level, progress):
            problems += checked.problems
            num_images += checked.num_images
            size_bytes += checked.size_bytes
    index = read_index(folder, fingerprint.sha256) if fingerprint else None
    return VerifyReport(
        folder=folder,
        level=level,
        num_shards=len(names),
        num_images=num_images,
        size_bytes=size_bytes,
        read_bytes=progress.num_bytes,
        problems=_with_files(problems, plan),
        unfinished=pending.shards(),
        index="current" if index else "not used" if (folder / INDEX).exists() else "none",
        seconds=round(time.perf_counter() - start, 3),
    )


def check_manifest(folder: Path) -> tuple[Fingerprint | None, list[Problem]]:
    """The fingerprint of a cache if its manifest is sound, and what is wrong with it.

    Raises:
        CacheError: there is no manifest, or it is of a format that this version does not read.
    """
    path = folder / MANIFEST
    try:
        fingerprint = read_manifest(folder)
        if json.loads(path.read_text())["sha256"] == fingerprint.sha256:
            return fingerprint, []
        what = f"{path}: its fingerprint does not have the sha256 that stands beside it"
    except CacheCorrupt as error:
        what = str(error).partition(";")[0]
    except BROKEN as error:
        what = f"{path} is broken ({error!r})"
    return None, [Problem("", "", what, "manifest")]


def check_plan(folder: Path, finished: Sequence[str]) -> tuple[Plan, list[Problem]]:
    """The plan of a cache, an empty one if it is broken, and what is wrong with it.

    `finished` shards must have been listed before: they were planned before they were made.
    """
    try:
        plan = read_plan(folder)
    except CacheCorrupt as error:
        return Plan(), [Problem("", "", str(error).partition(";")[0], "plan")]
    end = shard_number(plan.shards[-1].name) + 1 if plan.shards else 0
    unplanned = [name for name in finished if shard_number(name) >= end]
    if not unplanned:
        return plan, []
    are = f"{count(len(unplanned), 'finished shard')} {'is' if len(unplanned) == 1 else 'are'} in no plan"
    return plan, [Problem("", "", f"{plan_path(folder, plan.num_parts)} is missing: {are}", "plan")]


class Pending:
    """The shards of a cache that have no receipt, less those whose images other shards turn out to hold.

    May be used from several threads.
    """

    def __init__(self, folder: Path, plan: Plan, finished: Iterable[str]) -> None:
        known = set(finished)
        self._files = [path.stem for path in (folder / SHARDS).glob("*.safetensors") if path.stem not in known]
        self._shards_of: dict[str, set[str]] = defaultdict(set)
        for shard in plan.shards:
            if shard.name not in known:
                for key in shard.keys:
                    self._shards_of[key].add(shard.name)

    def settle(self, receipt: Receipt) -> None:
        """Note what a finished shard holds."""
        if self._shards_of:
            for key in (*receipt.images, *receipt.failed):
                self._shards_of.pop(key, None)

    def shards(self) -> list[str]:
        """By name: what is left once every receipt has been shown to `settle`."""
        return sorted({*self._files, *itertools.chain.from_iterable(self._shards_of.values())})


class _Checked(NamedTuple):
    """What was found of a shard; no more of it is kept."""

    num_images: int
    size_bytes: int
    problems: list[Problem]


class _Check:
    """Looks at a receipt and its shard."""

    def __init__(
        self, folder: Path, fingerprint: Fingerprint | None, level: Level, progress: _Progress, pending: Pending
    ) -> None:
        self._folder, self._fingerprint, self._progress, self._pending = folder, fingerprint, progress, pending
        self._sha256 = fingerprint.sha256 if fingerprint else None
        self._level = level

    def __call__(self, name: str) -> _Checked:
        receipt, problems = verify_shard(
            self._folder, name, self._fingerprint, self._sha256, self._level, self._progress.count
        )
        self._progress.finish_shard()
        if receipt is None:
            return _Checked(0, 0, problems)
        self._pending.settle(receipt)
        return _Checked(len(receipt.images), receipt.size_bytes, problems)


def verify_shard(
    folder: Path, name: str, fingerprint: Fingerprint | None, sha256: str | None, level: Level, take: Take = ignore
) -> tuple[Receipt | None, list[Problem]]:
    """The receipt of a shard, if it is sound, and what is wrong with it and the shard.

    `sha256` is the fingerprint's, which takes as long to compute as all the rest; both are None if they are not known.
    """
    try:
        receipt = read_receipt(folder, name)
    except FileNotFoundError:  # removed since we listed them
        return None, []
    except (CacheCorrupt, *BROKEN, OSError) as error:
        return None, [Problem(name, "", str(error).partition(";")[0], "receipt")]
    problems = []
    if sha256 not in (None, receipt.fingerprint):
        what = f"the receipt belongs to another cache ({receipt.fingerprint[:16]})"
        problems.append(Problem(name, "", what, "receipt"))
    problems += check_shard(folder, receipt, fingerprint, every_byte=level == "full", take=take)
    return receipt, problems


def _each(check: _Check, names: list[str], level: Level, progress: _Progress) -> Iterator[_Checked]:
    """What `check` finds of each shard, in order: on threads where the disk makes one wait.

    For a quick look at a disk that answers at once, threads would only wait for each other: 10,000 shards take three
    times as long with 8 of them as with one.
    """
    start, num_tried = time.perf_counter(), 0
    while level == "quick" and num_tried < min(NUM_TRIED, len(names)):
        yield check(names[num_tried])
        num_tried += 1
    rest = names[num_tried:]
    if level == "quick" and time.perf_counter() - start < num_tried * SLOW_S:
        yield from map(check, rest)
        return
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        try:
            yield from threads.map(check, rest)
        except BaseException:
            progress.end()  # else Ctrl-C would wait until the shards in hand are read
            raise


def _with_files(problems: list[Problem], plan: Plan) -> list[Problem]:
    wanted = {problem.image for problem in problems if problem.image}
    file_of = {image.key: image.files[0] for image in plan.images() if image.key in wanted and image.files}
    return [replace(problem, file=file_of.get(problem.image, "")) for problem in problems]


def named(names: list[str], most: int = 5) -> str:
    """The first few of some names."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class _Progress:
    """A bar of bytes, or of shards where few bytes are read; counted by several threads."""

    def __init__(self, folder: Path, names: list[str], level: Level) -> None:
        self.num_bytes = 0
        self._ended = False
        self._lock = threading.Lock()
        self._in_bytes = level == "full"
        total = sum(_sizes(folder)) if self._in_bytes else len(names)
        unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if self._in_bytes else {"unit": "shard"}
        self._bar = tqdm(total=total, desc=f"verify, {level}", leave=False, disable=None, **unit)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def end(self) -> None:
        """Let the threads that read end at their next piece."""
        self._ended = True

    def count(self, piece: memoryview, offset: int) -> None:
        if self._ended:
            raise InterruptedError
        with self._lock:
            self.num_bytes += len(piece)
            if self._in_bytes:
                self._bar.update(len(piece))

    def finish_shard(self) -> None:
        if not self._in_bytes:
            with self._lock:
                self._bar.update()


def _sizes(folder: Path) -> Iterator[int]:
    try:
        yield from (entry.stat().st_size for entry in os.scandir(folder / SHARDS))
    except FileNotFoundError:
        return
