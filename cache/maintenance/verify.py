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
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from lookonce.cache.constants import REPAIR_COMMAND
from lookonce.cache.maintenance.checks import Problem, Take, check_shard, ignore
from lookonce.cache.maintenance.rebuild import shard_number
from lookonce.cache.maintenance.scan import Walk
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.index import INDEX, read_index
from lookonce.cache.store.manifest import BROKEN, MANIFEST, plan_path, read_manifest, read_plan
from lookonce.cache.store.plan import Plan
from lookonce.cache.store.receipts import Receipt, finished_shards, read_receipt
from lookonce.cache.store.shards import SHARDS
from lookonce.errors import CacheCorrupt
from lookonce.text import count, duration, size

Level = Literal["quick", "full"]
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
    pending = Pending(folder, plan, names)
    with Walk(folder, names, every_byte=level == "full") as walk:
        for checked in walk.each(_Check(folder, fingerprint, level, walk.count, pending)):
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
        read_bytes=walk.num_bytes,
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
        self, folder: Path, fingerprint: Fingerprint | None, level: Level, take: Take, pending: Pending
    ) -> None:
        self._folder, self._fingerprint, self._level = folder, fingerprint, level
        self._sha256 = fingerprint.sha256 if fingerprint else None
        self._take, self._pending = take, pending

    def __call__(self, name: str) -> _Checked:
        receipt, problems = verify_shard(self._folder, name, self._fingerprint, self._sha256, self._level, self._take)
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


def _with_files(problems: list[Problem], plan: Plan) -> list[Problem]:
    wanted = {problem.image for problem in problems if problem.image}
    file_of = {image.key: image.files[0] for image in plan.images() if image.key in wanted and image.files}
    return [replace(problem, file=file_of.get(problem.image, "")) for problem in problems]


def named(names: list[str], most: int = 5) -> str:
    """The first few of some names."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
