"""Compare a cache with its checksums: the report behind `cache verify`, and the checks of shards for repair and stage.

Design: everything in a cache folder that features depend on has a checksum (../FORMAT.md): a shard is a header followed
by images without gaps, each with its checksum, so a flipped bit is traced to its image. `quick` reads receipts, headers
and file sizes: it finds lost, truncated and swapped files, in seconds for 10,000 shards. `full` reads every byte, as
fast as the disk allows. All problems are reported, not only the first. Files are read with `pread` in blocks, on
several threads: memory is bounded whatever the size of an image, and network filesystems are fastest with large
requests. A broken index is not damage: readers use the receipts instead.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import xxhash
from tqdm import tqdm

from lookonce.cache.format import PARSE_ERRORS, REPAIR_COMMAND, read_header
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    Entry,
    Plan,
    Receipt,
    finished_shards,
    plan_path,
    read_manifest,
    read_plan,
    read_receipt,
)
from lookonce.cache.store.reader import INDEX, read_index
from lookonce.cache.store.shards import FORMAT_NAME, SHARDS, described, shard_path
from lookonce.errors import CacheCorrupt
from lookonce.files import parse_json, threaded_map
from lookonce.text import count, duration, first_few, listed, shown, size

Level = Literal["quick", "full"]
Part = Literal["manifest", "plan", "receipt", "shard", "header", "image"]
OnBlock = Callable[[memoryview, int], object]
"""Is called with each block that was read and its offset; may raise to end the reading."""
NUM_NAMED = 20
"""How many problems the text of a report shows."""
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
    index = read_index(folder, fingerprint.sha256) if fingerprint else None
    return VerifyReport(
        folder=folder,
        level=level,
        num_shards=len(names),
        num_images=num_images,
        size_bytes=size_bytes,
        read_bytes=reading.num_bytes,
        problems=[replace(problem, file=file_of.get(problem.image, "")) for problem in problems],
        unfinished=sorted(unfinished | (files.keys() - set(names))),
        index="current" if index else "not used" if (folder / INDEX).exists() else "none",
        seconds=round(time.perf_counter() - start, 3),
    )


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
    """The fingerprint of a cache if its manifest is intact, and the manifest's problems.

    Raises:
        CacheError: there is no manifest, or it has a format that this version does not read.
    """
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
    """The xxh3_64 of the bytes in a region, as far as the file reaches.

    Raises:
        Unreadable: they cannot be read.
    """
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
