"""Compare a cache with its checksums (`cache verify`), and remove what is damaged (`cache repair`).

Design: a shard is a header followed by images without gaps, each with its checksum (../FORMAT.md), so a flipped bit is
traced to its image. `quick` reads receipts, headers and file sizes: it finds lost, truncated and swapped files, in
seconds for 10,000 shards. `full` reads every byte, with `pread` in large blocks, on several threads: memory is bounded
whatever the size of an image, and network filesystems are fastest so. A broken index is not damage: readers use the
receipts instead.

One rule repairs all damage: what is damaged is removed, and the next build writes it again. A broken manifest is
written again from the run's fingerprint; a broken plan file is removed with those after it, and a damaged shard with
its receipt. A shard is removed only after each of its images was found again, with the right bytes, in the files of the
run or in those that the plan names, or in other shards. The receipt is removed last, so an interrupted repair leaves a
receipt without its shard, which the next one finds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import xxhash
from tqdm import tqdm

from lookonce.cache.format import BUILD_COMMAND, PARSE_ERRORS, REPAIR_COMMAND, read_header
from lookonce.cache.store.claims import owning
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    MANIFEST,
    PLAN,
    Entry,
    Plan,
    Receipt,
    Shard,
    ensure_manifest,
    finished_shards,
    plan_files,
    plan_path,
    read_manifest,
    read_plan,
    read_plan_file,
    read_receipt,
    receipt_path,
)
from lookonce.cache.store.reader import INDEX, read_index
from lookonce.cache.store.shards import FORMAT_NAME, SHARDS, described, shard_path
from lookonce.claim_file import EXPIRY_S
from lookonce.datasets.augment import Variant
from lookonce.datasets.images import ImageIndex, Size, bytes_key, image_size, read_many
from lookonce.errors import CacheCorrupt, CacheError, ImageError
from lookonce.files import parse_json, threaded_map
from lookonce.text import count, duration, first_few, listed, shown, size

Level = Literal["quick", "full"]
Part = Literal["manifest", "plan", "receipt", "shard", "header", "image"]
OnBlock = Callable[[memoryview, int], object]
"""Is called with each block that was read and its offset; may raise to end the reading."""
NUM_NAMED = 20
BLOCK_BYTES = 8 << 20
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """Something in a cache that differs from what was written."""

    shard: str
    """The shard's name; empty if the problem is not in a shard."""
    image: str
    """The image's key; empty if the problem is not in one image."""
    what: str
    part: Part
    file: str = ""
    """The image's file, if the plan names one."""

    def text(self) -> str:
        file = f" ({self.file})" if self.file else ""
        where = [self.shard, f"image {self.image}{file}" if self.image else ""]
        return ": ".join([*(name for name in where if name), self.what])


def without_advice(error: Exception) -> str:
    """The message of an error without the advice that follows its semicolon."""
    return str(error).partition(";")[0]


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and all problems found."""

    folder: Path
    level: Level
    num_shards: int
    num_images: int
    size_bytes: int
    read_bytes: int
    problems: list[Problem]
    unfinished: list[str]
    """Shards that were started or planned and have no receipt. They are work to do, not damage."""
    index: Literal["current", "none", "not used", "unknown"]
    """Whether readers can use the index file; otherwise they read the receipts. Unknown if the manifest is broken."""
    seconds: float

    def text(self) -> str:
        content = f"{count(self.num_images, 'image')} in {count(self.num_shards, 'shard')}, {size(self.size_bytes)}"
        if self.problems:
            where = f" in {count(len(self.damaged), 'shard')}" if self.damaged else ""
            state = f"{count(len(self.problems), 'problem')}{where}"
        else:
            state = "intact" if self.level == "full" else "no problems"
        checked = {"quick": "receipts, headers and sizes checked", "full": "every byte checked"}[self.level]
        rate = f", {size(self.read_bytes / self.seconds)}/s" if self.level == "full" and self.seconds else ""
        lines = [f"cache {self.folder}: {content}, {state}; {checked} in {duration(self.seconds)}{rate}"]
        lines += first_few([problem.text() for problem in self.problems], NUM_NAMED, " (--json has them all)")
        if self.unfinished:
            lines.append(f"{count(len(self.unfinished), 'shard')} unfinished: {listed(self.unfinished)}")
        if self.index == "not used":
            lines.append("the index does not match the receipts and is not used; the next build writes it again")
        if self.problems:
            lines.append(f"repair it with: {REPAIR_COMMAND}")
        return "\n".join(lines)

    @property
    def damaged(self) -> list[str]:
        return list(dict.fromkeys(problem.shard for problem in self.problems if problem.shard))


def verify(folder: Path, level: Level = "full") -> VerifyReport:
    """Compare a cache with its checksums; raises CacheError if it is not a cache, or of a format that is not read."""
    start = time.perf_counter()
    fingerprint, problems = check_manifest(folder)
    names = finished_shards(folder)
    plan = Plan()
    try:
        plan = read_plan(folder)
        if names and not plan.num_files:  # a shard is planned before it is built
            problems.append(Problem("", "", f"{plan_path(folder, 0)} is missing", "plan"))
    except CacheCorrupt as error:
        problems.append(Problem("", "", without_advice(error), "plan"))
    files = {path.stem: path.stat().st_size for path in (folder / SHARDS).glob("*.safetensors")}
    pending = [shard for shard in plan.shards if shard.name not in set(names)]
    unstored = {key for shard in pending for key in shard.keys}
    num_images = size_bytes = 0
    reading = Reading("verify", sum(files.values()) if level == "full" else None)
    with reading.bar:
        checked = reading.map(lambda name: verify_shard(folder, name, fingerprint, level, reading.count), names)
        for receipt, shard_problems in checked:
            problems += shard_problems
            if receipt:
                num_images += len(receipt.images)
                size_bytes += receipt.size_bytes
                unstored.difference_update(receipt.images, receipt.failed)
    unfinished = {shard.name for shard in pending if not unstored.isdisjoint(shard.keys)}
    damaged_images = {problem.image for problem in problems if problem.image}
    file_of = plan.names(damaged_images)
    return VerifyReport(
        folder=folder,
        level=level,
        num_shards=len(names),
        num_images=num_images,
        size_bytes=size_bytes,
        read_bytes=reading.num_bytes,
        problems=[replace(problem, file=file_of.get(problem.image, "")) for problem in problems],
        unfinished=sorted(unfinished | (files.keys() - set(names))),
        index=_state_of_index(folder, fingerprint),
        seconds=round(time.perf_counter() - start, 3),
    )


def _state_of_index(folder: Path, fingerprint: Fingerprint | None) -> Literal["current", "none", "not used", "unknown"]:
    if not (folder / INDEX).exists():
        return "none"
    if fingerprint is None:
        return "unknown"
    return "current" if read_index(folder, fingerprint.sha256) else "not used"


class Reading:
    """Reads shards on threads, with a progress bar of bytes; after a failure or Ctrl-C they end at their next block."""

    def __init__(self, description: str, total: int | None) -> None:
        self.num_bytes = 0
        self.bar = tqdm(total=total, desc=description, unit="B", unit_scale=True, leave=False, disable=None)
        self._stop, self._lock = threading.Event(), threading.Lock()

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The result of `function` for each item, in order; it must call `count` for each block."""
        return threaded_map(function, items, self._stop)

    def count(self, block: memoryview, offset: int = 0) -> None:
        """Count a block that was read; raises InterruptedError if the reading has ended."""
        if self._stop.is_set():
            raise InterruptedError
        with self._lock:
            self.num_bytes += len(block)
            self.bar.update(len(block))


def check_manifest(folder: Path) -> tuple[Fingerprint | None, list[Problem]]:
    """The fingerprint if the manifest is intact, and its problems; raises CacheError if there is none to read."""
    try:
        return read_manifest(folder), []
    except CacheCorrupt as error:
        return None, [Problem("", "", without_advice(error), "manifest")]


def verify_shard(
    folder: Path, name: str, fingerprint: Fingerprint | None, level: Level, on_block: OnBlock
) -> tuple[Receipt | None, list[Problem]]:
    """The receipt of a shard, if it is intact, and the problems of both; the fingerprint is None if it is unknown."""
    try:
        receipt = read_receipt(folder, name)
    except FileNotFoundError:  # removed since the shards were listed
        return None, []
    except (CacheCorrupt, *PARSE_ERRORS, OSError) as error:
        return None, [Problem(name, "", without_advice(error), "receipt")]
    problems = []
    if fingerprint and fingerprint.sha256 != receipt.fingerprint:
        message = f"the receipt belongs to another cache ({receipt.fingerprint[:16]})"
        problems.append(Problem(name, "", message, "receipt"))
    problems += check_shard(folder, receipt, fingerprint, every_byte=level == "full", on_block=on_block)
    return receipt, problems


def regions(receipt: Receipt) -> list[tuple[str, Entry]]:
    """The header, without a key, and then the images, in their order in the file; gaps would be in the header too."""
    header = Entry(0, receipt.header_bytes, 0, (0, 0, 0), receipt.header_xxh3_64)
    return [("", header), *sorted(receipt.images.items(), key=lambda item: item[1].offset)]


class Unreadable(OSError):
    """A block of a shard cannot be read."""


def checksum(file: BinaryIO, region: Entry, on_block: OnBlock) -> str:
    """The xxh3_64 of the bytes in a region, as far as the file reaches; raises Unreadable if they cannot be read."""
    digest = xxhash.xxh3_64()
    offset, end = region.offset, region.offset + region.size_bytes
    while offset < end:
        try:
            block = os.pread(file.fileno(), min(BLOCK_BYTES, end - offset), offset)
        except OSError as error:
            raise Unreadable(error.strerror) from None
        if not block:
            break
        digest.update(block)
        on_block(memoryview(block), offset)
        offset += len(block)
    return digest.hexdigest()


def check_shard(
    folder: Path, receipt: Receipt, fingerprint: Fingerprint | None, *, every_byte: bool, on_block: OnBlock
) -> Iterator[Problem]:
    """Problems of a shard: its presence, size and header; with `every_byte` also its images and the header's content.

    Without a fingerprint, because the manifest is broken, the header's content is not compared.
    """
    path, name = shard_path(folder, receipt.shard), receipt.shard
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        message = f"{path} is missing" if missing else f"cannot read {path}: {error.strerror}"
        yield Problem(name, "", message, "shard")
        return
    with file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != receipt.size_bytes:
            message = f"the shard has {size_bytes:,} bytes, its receipt says {receipt.size_bytes:,}"
            yield Problem(name, "", message, "shard")
        header, *images = regions(receipt)
        is_whole = True
        for key, region in [header, *images] if every_byte else [header]:
            try:
                if checksum(file, region, on_block) == region.xxh3_64:
                    continue
                message = "do not match the checksum in the receipt"
            except Unreadable as error:  # not OSError, which `on_block` may raise
                message = f"cannot be read: {error}"
            bytes_of = "its bytes" if key else "the bytes of its header"
            yield Problem(name, key, f"{bytes_of} {message}", "image" if key else "header")
            is_whole &= bool(key)
        if every_byte and fingerprint and is_whole:
            yield from check_header(path, receipt, fingerprint)


def check_header(path: Path, receipt: Receipt, fingerprint: Fingerprint) -> Iterator[Problem]:
    """Differences between the safetensors header of a shard and its receipt."""
    try:
        header, _ = read_header(path)
        metadata = header.pop("__metadata__")
        grids = parse_json(metadata["grid_thw"])
        if metadata["format"] != FORMAT_NAME:
            raise ValueError(f"its format is {metadata['format']!r}, not {FORMAT_NAME!r}")
    except (OSError, *PARSE_ERRORS) as error:
        yield Problem(receipt.shard, "", f"the header cannot be parsed ({shown(repr(error))})", "header")
        return
    if metadata.get("fingerprint") != receipt.fingerprint:
        yield Problem(receipt.shard, "", "the header and the receipt have different fingerprints", "header")
    recorded = described(receipt.images, receipt.header_bytes, fingerprint)
    for name in sorted(header.keys() | recorded.keys()):
        if header.get(name) != recorded.get(name):
            message = f"the header says {shown(str(header.get(name)))}, the receipt {recorded.get(name)}"
            yield Problem(receipt.shard, shown(name.partition(".")[0]), message, "header")
    if grids != {key: list(entry.grid_thw) for key, entry in receipt.images.items()}:
        yield Problem(receipt.shard, "", "the header and the receipt have different patch grids", "header")


ImageFiles = dict[str, tuple[Path, Size | None]]
"""A file and the image size for each image key."""


@dataclass
class RepairReport:
    """What was damaged, and what was done about it."""

    folder: Path
    level: Level
    num_problems: int = 0
    rewritten: list[str] = field(default_factory=list)
    """The manifest, and plan files that the next build writes again."""
    removed: list[str] = field(default_factory=list)
    num_again: int = 0
    lost: list[str] = field(default_factory=list)
    """Images of removed shards that were not found again."""
    left: dict[str, str] = field(default_factory=dict)
    """Shards that stay damaged, and why."""

    def text(self) -> str:
        problems = f"{count(self.num_problems, 'problem')} found" if self.num_problems else "nothing to repair"
        lines = [f"cache {self.folder}: {problems}"]
        if self.rewritten:
            lines.append(f"  written again: {listed(self.rewritten)}")
        if self.removed:
            again = f"{count(self.num_again, 'image')} to encode again"
            lines.append(f"  removed {count(len(self.removed), 'damaged shard')} ({listed(self.removed)}): {again}")
        if self.lost:
            lines.append(f"  lost {count(len(self.lost), 'image')}, whose files were not found: {listed(self.lost)}")
        lines += [f"  did not repair {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


def repair(
    folder: Path,
    fingerprint: Fingerprint,
    images: ImageIndex,
    *,
    level: Level = "full",
    drop: bool = False,
    provenance: Mapping[str, Any] | None = None,
    expiry_s: float = EXPIRY_S,
) -> tuple[RepairReport, ImageIndex]:
    """Remove the damage in the cache of a run; also returns the images to build: the run's, and others of its shards.

    `images` are the run's. `level` says how to look for damage. `drop` removes damaged shards even if some of their
    images are not found again. `provenance` is for a manifest that must be written again.

    Raises:
        CacheError: the folder has no shards, or another process uses it.
        CacheMismatch: the folder holds another cache.
    """
    if not (folder / SHARDS).exists():
        raise CacheError(f"{folder} holds no shards to repair; make them with: {BUILD_COMMAND}")
    report = RepairReport(folder, level)
    to_encode: ImageFiles = {}
    with owning(folder, "lookonce cache repair", expiry_s) as check_owned:
        manifest = folder / MANIFEST
        if not manifest.exists() or check_manifest(folder)[1]:
            manifest.unlink(missing_ok=True)
            report.num_problems += 1
            report.rewritten.append(MANIFEST)
        ensure_manifest(folder, fingerprint, provenance or {})
        verification = verify(folder, level)
        report.num_problems += len(verification.problems)
        plan, broken = remove_broken_plan(folder)
        is_lost = any(problem.part == "plan" for problem in verification.problems) and not broken
        report.rewritten += [PLAN] if is_lost else broken
        planned = {shard.name: shard for shard in plan.shards}
        intact = [name for name in finished_shards(folder) if name not in verification.damaged]
        for name in verification.damaged:
            shard = planned.get(name, Shard(name, ()))
            needed = images_of_shard(folder, shard)
            files = find_files({*(needed or ()), *shard.keys}, plan, images)
            lost = set(needed or ()) - files.keys()
            for intact_name in intact if lost else ():
                lost -= read_receipt(folder, intact_name).images.keys()
            if not drop and (reason := reason_to_keep(needed, lost)):
                report.left[name] = reason
                continue
            check_owned()
            shard_path(folder, name).unlink(missing_ok=True)
            receipt_path(folder, name).unlink(missing_ok=True)
            report.removed.append(name)
            report.lost += sorted(lost)
            to_encode |= files
    report.num_again = len(to_encode)
    return report, with_files(images, to_encode, plan.variants)


def remove_broken_plan(folder: Path) -> tuple[Plan, list[str]]:
    """Remove the first broken plan file and all after it; returns the intact plan and the names of those files."""
    plan, files = Plan(), plan_files(folder)
    with contextlib.suppress(CacheCorrupt):
        for path in files:
            plan = plan.extended(*read_plan_file(path))
    broken = files[plan.num_files :]
    for path in reversed(broken):  # the last first, so that an interruption leaves no gap
        path.unlink()
    return plan, [path.name for path in broken]


def images_of_shard(folder: Path, planned: Shard) -> set[str] | None:
    """The images of a shard by its receipt, or all that it may have by the plan, or by its header; None if unknown."""
    with contextlib.suppress(CacheCorrupt, OSError):
        return set(read_receipt(folder, planned.name).images)
    if planned.images:
        return set(planned.keys)
    with contextlib.suppress(ValueError, OSError):
        header, _ = read_header(shard_path(folder, planned.name))
        return {name.partition(".")[0] for name in header} - {"__metadata__"}
    return None


def find_files(keys: set[str], plan: Plan, images: ImageIndex) -> ImageFiles:
    """Files that still have the bytes of these images: those of the run first, then those of the plan.

    The file of a variant is that of its image.
    """
    file_of: ImageFiles = {}
    variants = images.variants | plan.variants
    made_from: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        made_from[variants[key].of if key in variants else key].append(key)
    of_run = {images.path_of[key] for key in made_from if key in images.path_of}
    of_plan = {Path(file) for image in plan.images if image.key in made_from for file in image.files}
    for paths in (of_run, of_plan - of_run):
        if keys <= file_of.keys():
            break
        for path, data in read_many(sorted(paths)):
            if not isinstance(data, ImageError):
                for key in made_from.get(bytes_key(data), ()):
                    file_of.setdefault(key, (path, image_size(data)))
    return file_of


def reason_to_keep(needed: set[str] | None, lost: set[str]) -> str:
    """Why a damaged shard with the images `needed` is not removed; empty if it can be."""
    if needed is None:
        return "which images it holds is unknown; remove it with --drop"
    if lost:
        return (
            f"the files of {len(lost):,} of its {count(len(needed), 'image')} were not found: {listed(sorted(lost))}; "
            "restore them, or remove the shard and lose these images with --drop"
        )
    return ""


def with_files(images: ImageIndex, file_of: ImageFiles, variants: Mapping[str, Variant]) -> ImageIndex:
    """The images of the run, and the other images of these files, some of which are variants."""
    added = {key: file for key, file in file_of.items() if key not in images.path_of}
    return replace(
        images,
        key_of=images.key_of | {path: key for key, (path, _) in added.items() if key not in variants},
        variants=images.variants | {key: variants[key] for key in added if key in variants},
        path_of=images.path_of | {key: path for key, (path, _) in added.items()},
        size_of=images.size_of | {key: size for key, (_, size) in added.items()},
    )
