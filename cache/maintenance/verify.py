"""Compare a cache with its checksums: the report behind `cache verify`.

Design: everything in a cache folder that features depend on has a checksum. Each receipt and each plan file carries its
own, the manifest has that of the fingerprint, and receipts have those of every byte of every shard. `quick` reads
receipts, headers and file sizes: it finds lost, truncated and swapped files, in about a second for 10,000 shards.
`full` reads every byte, as fast as the disk allows. All problems are reported, not only the first.

No feature depends on these, so they have no checksum: the manifest's provenance, the summary in `quarantine.jsonl`,
claims and notes of use. A broken index is not damage: readers use the receipts instead.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from lookonce.cache.format import PARSE_ERRORS, REPAIR_COMMAND
from lookonce.cache.maintenance.checks import OnBlock, Problem, Scan, check_shard, ignore, without_advice
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    MANIFEST,
    Plan,
    Receipt,
    finished_shards,
    plan_path,
    read_manifest,
    read_plan,
    read_receipt,
    shard_number,
)
from lookonce.cache.store.reader import INDEX, read_index
from lookonce.cache.store.shards import SHARDS
from lookonce.errors import CacheCorrupt
from lookonce.files import read_json
from lookonce.text import count, duration, listed, size

Level = Literal["quick", "full"]
NUM_NAMED = 20
"""How many problems the text of a report shows."""


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and all problems found."""

    folder: Path
    level: Level
    num_shards: int
    """Number of finished shards."""
    num_images: int
    size_bytes: int
    read_bytes: int
    problems: list[Problem]
    unfinished: list[str]
    """Shards that were started or planned and have no receipt. They are work to do, not damage."""
    index: Literal["current", "none", "not used"]
    """Whether readers can use the index file; otherwise they read the receipts."""
    seconds: float

    def text(self) -> str:
        lines = [f"cache {self.folder}: {self._found()}; {self._checked()}"]
        lines += [f"  {problem.text()}" for problem in self.problems[:NUM_NAMED]]
        if len(self.problems) > NUM_NAMED:
            lines.append(f"  and {len(self.problems) - NUM_NAMED:,} more (--json has them all)")
        if self.unfinished:
            lines.append(f"{count(len(self.unfinished), 'shard')} unfinished: {listed(self.unfinished)}")
        if self.index == "not used":
            lines.append("the index does not match the receipts and is not used; the next build writes it again")
        if self.problems:
            lines.append(f"repair it with: {REPAIR_COMMAND}")
        return "\n".join(lines)

    def _found(self) -> str:
        content = f"{count(self.num_images, 'image')} in {count(self.num_shards, 'shard')}, {size(self.size_bytes)}"
        if not self.problems:
            return f"{content}, {'intact' if self.level == 'full' else 'no problems'}"
        where = f" in {count(len(self.damaged), 'shard')}" if self.damaged else ""
        return f"{content}, {count(len(self.problems), 'problem')}{where}"

    def _checked(self) -> str:
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
        CacheError: the folder is not a cache, or has a format that this version does not read.
    """
    start = time.perf_counter()
    fingerprint, problems = check_manifest(folder)
    names = finished_shards(folder)
    plan, plan_problems = check_plan(folder, names)
    problems += plan_problems
    num_images = size_bytes = 0
    unfinished = _Unfinished(folder, plan, names)
    with Scan(folder, names, every_byte=level == "full") as scan:
        for checked in scan.each(_Check(folder, fingerprint, level, scan.count_block, unfinished)):
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
        read_bytes=scan.num_bytes,
        problems=_with_files(problems, plan),
        unfinished=unfinished.shards(),
        index="current" if index else "not used" if (folder / INDEX).exists() else "none",
        seconds=round(time.perf_counter() - start, 3),
    )


def check_manifest(folder: Path) -> tuple[Fingerprint | None, list[Problem]]:
    """The fingerprint of a cache if its manifest is intact, and the manifest's problems.

    Raises:
        CacheError: there is no manifest, or it has a format that this version does not read.
    """
    path = folder / MANIFEST
    try:
        fingerprint = read_manifest(folder)
        if read_json(path)["sha256"] == fingerprint.sha256:
            return fingerprint, []
        what = f"{path}: its sha256 is not that of its fingerprint"
    except CacheCorrupt as error:
        what = without_advice(error)
    except PARSE_ERRORS as error:
        what = f"{path} is broken ({error!r})"
    return None, [Problem("", "", what, "manifest")]


def check_plan(folder: Path, finished: Sequence[str]) -> tuple[Plan, list[Problem]]:
    """The plan of a cache, empty if it is broken, and its problems.

    `finished` must have been listed before the call: a shard is planned before it is built.
    """
    try:
        plan = read_plan(folder)
    except CacheCorrupt as error:
        return Plan(), [Problem("", "", without_advice(error), "plan")]
    end = shard_number(plan.shards[-1].name) + 1 if plan.shards else 0
    unplanned = [name for name in finished if shard_number(name) >= end]
    if not unplanned:
        return plan, []
    are = f"{count(len(unplanned), 'finished shard')} {'is' if len(unplanned) == 1 else 'are'} in no plan"
    return plan, [Problem("", "", f"{plan_path(folder, plan.num_files)} is missing: {are}", "plan")]


class _Unfinished:
    """The shards of a cache without a receipt, except those whose images other shards have. Thread-safe."""

    def __init__(self, folder: Path, plan: Plan, finished: Iterable[str]) -> None:
        known = set(finished)
        self._files = [path.stem for path in (folder / SHARDS).glob("*.safetensors") if path.stem not in known]
        self._shards_of: dict[str, set[str]] = defaultdict(set)
        for shard in plan.shards:
            if shard.name not in known:
                for key in shard.keys:
                    self._shards_of[key].add(shard.name)

    def add_finished(self, receipt: Receipt) -> None:
        """Take the images of a finished shard into account."""
        if self._shards_of:
            for key in (*receipt.images, *receipt.failed):
                self._shards_of.pop(key, None)

    def shards(self) -> list[str]:
        """Names of the unfinished shards, once every receipt was given to `add_finished`."""
        return sorted({*self._files, *itertools.chain.from_iterable(self._shards_of.values())})


class _Checked(NamedTuple):
    """The result of checking a shard."""

    num_images: int
    size_bytes: int
    problems: list[Problem]


class _Check:
    """Checks a receipt and its shard."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint | None,
        level: Level,
        on_block: OnBlock,
        unfinished: _Unfinished,
    ) -> None:
        self._folder, self._fingerprint, self._level = folder, fingerprint, level
        self._sha256 = fingerprint.sha256 if fingerprint else None
        self._on_block, self._unfinished = on_block, unfinished

    def __call__(self, name: str) -> _Checked:
        receipt, problems = verify_shard(
            self._folder, name, self._fingerprint, self._sha256, self._level, self._on_block
        )
        if receipt is None:
            return _Checked(0, 0, problems)
        self._unfinished.add_finished(receipt)
        return _Checked(len(receipt.images), receipt.size_bytes, problems)


def verify_shard(
    folder: Path,
    name: str,
    fingerprint: Fingerprint | None,
    sha256: str | None,
    level: Level,
    on_block: OnBlock = ignore,
) -> tuple[Receipt | None, list[Problem]]:
    """The receipt of a shard, if it is intact, and the problems of both.

    `sha256` is the fingerprint's; it is a parameter because computing it takes as long as a quick check. Both are None
    if they are unknown.
    """
    try:
        receipt = read_receipt(folder, name)
    except FileNotFoundError:  # removed since the shards were listed
        return None, []
    except (CacheCorrupt, *PARSE_ERRORS, OSError) as error:
        return None, [Problem(name, "", without_advice(error), "receipt")]
    problems = []
    if sha256 not in (None, receipt.fingerprint):
        what = f"the receipt belongs to another cache ({receipt.fingerprint[:16]})"
        problems.append(Problem(name, "", what, "receipt"))
    problems += check_shard(folder, receipt, fingerprint, every_byte=level == "full", on_block=on_block)
    return receipt, problems


def _with_files(problems: list[Problem], plan: Plan) -> list[Problem]:
    wanted = {problem.image for problem in problems if problem.image}
    file_of = {image.key: image.files[0] for image in plan.images() if image.key in wanted and image.files}
    return [replace(problem, file=file_of.get(problem.image, "")) for problem in problems]
