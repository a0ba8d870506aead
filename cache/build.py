"""Build a cache: plan it, then make each shard that is not there yet.

Design: the unit of work is a shard. A run that was killed leaves finished shards, which are kept, and at most one
unfinished one, which is made again. An image that can not be encoded is quarantined with its reason and the build goes
on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.cache.encode import NUM_READERS, encode
from lookonce.cache.fingerprint import Fingerprint
from lookonce.cache.folder import (
    QUARANTINE,
    add_to_quarantine,
    claim,
    only_builder,
    read_plan,
    read_quarantine,
    write_plan,
)
from lookonce.cache.pixels import ImageProcessor, read_size
from lookonce.cache.plan import Plan, Shard
from lookonce.cache.read import VisionCache
from lookonce.cache.shards import read_receipts, write_shard
from lookonce.cache.tower import Tower
from lookonce.text import count, duration, size

NUM_NAMED = 5
"""How many failed images a report names."""


@dataclass(frozen=True)
class BuildReport:
    """What `build_cache` did and what there is now."""

    folder: Path
    num_wanted: int
    num_encoded: int
    num_reused: int
    quarantined: dict[str, str]
    """Of the wanted images: key to reason."""
    num_shards: int
    size_bytes: int
    seconds: float

    def text(self) -> str:
        content = f"{count(self.num_shards, 'shard')}, {size(self.size_bytes)}"
        lines = [f"cache {self.folder}: {self._did()}; {content}"]
        if self.quarantined:
            failed = count(len(self.quarantined), "image")
            lines.append(f"{failed} could not be encoded (see {self.folder / QUARANTINE}):")
            lines += [f"  {reason}" for reason in list(self.quarantined.values())[:NUM_NAMED]]
        return "\n".join(lines)

    def _did(self) -> str:
        reused = f"{self.num_reused:,} of {count(self.num_wanted, 'image')} reused"
        if not self.num_encoded:
            return f"nothing new encoded, {reused}"
        encoded = f"encoded {count(self.num_encoded, 'image')} in {duration(self.seconds)}"
        return f"{encoded}, {reused}" if self.num_reused else encoded


def make_plan(
    folder: Path, fingerprint: Fingerprint, processor: ImageProcessor, images: Mapping[str, Path], shard_bytes: int
) -> Plan:
    """The plan of a cache, extended by those of `images` (key to file) that no shard can give.

    A shard can give an image if it is finished, or if all its images are among `images`, so that it can be made.
    """
    plan = read_plan(folder)
    have = settled_images(folder)
    to_come = {key for shard in plan.shards if _can_be_made(shard, have, images) for key in shard.keys}
    new = sorted(images.keys() - have - to_come)
    if not new:
        return plan
    with ThreadPoolExecutor(NUM_READERS) as threads:
        sizes = threads.map(read_size, (images[key] for key in new))
        num_tokens = [planned_tokens(processor, size) for size in sizes]
    size_of = {key: count * fingerprint.bytes_per_token for key, count in zip(new, num_tokens, strict=True)}
    return plan.extended(size_of, shard_bytes)


def build_cache(
    root: Path,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: Mapping[str, Path],
    load_tower: Callable[[], Tower],
    shard_bytes: int,
    provenance: Mapping[str, Any],
) -> BuildReport:
    """Encode those of `images` (key to file) that the cache below `root` lacks.

    `load_tower` is called only if there is something to encode. Safe to interrupt and to run again.

    Raises:
        CacheMismatch: the folder of this fingerprint holds another one.
        CacheError: another process builds there.
    """
    start = time.perf_counter()
    folder = root / fingerprint.folder_name
    claim(folder, fingerprint, provenance)
    with only_builder(folder):
        plan = make_plan(folder, fingerprint, processor, images, shard_bytes)
        if plan != read_plan(folder):
            write_plan(folder, plan)
        have = settled_images(folder)
        pending = [shard for shard in plan.shards if _can_be_made(shard, have, images)]
        if pending:
            _encode(folder, fingerprint, processor, images, load_tower(), pending)
    cache = VisionCache.open(folder)
    made = {key for shard in pending for key in shard.keys}
    return BuildReport(
        folder=folder,
        num_wanted=len(images),
        num_encoded=sum(key in made and key in cache for key in images),
        num_reused=sum(key not in made and key in cache for key in images),
        quarantined={key: reason for key, reason in cache.quarantined.items() if key in images and key not in cache},
        num_shards=cache.num_shards,
        size_bytes=cache.size_bytes,
        seconds=time.perf_counter() - start,
    )


def _can_be_made(shard: Shard, have: set[str], images: Mapping[str, Path]) -> bool:
    return not have.issuperset(shard.keys) and images.keys() >= set(shard.keys)


def settled_images(folder: Path) -> set[str]:
    """The images whose features are there, and those known to be impossible."""
    keys = {key for receipt in read_receipts(folder) for key in receipt.entries}
    return keys | read_quarantine(folder).keys()


def planned_tokens(processor: ImageProcessor, size: tuple[int, int] | None) -> int:
    """From the header; an image that has none, or of an impossible shape, is planned as nothing and found out later."""
    try:
        return processor.num_tokens(*size) if size else 0
    except ValueError:
        return 0


def _encode(
    folder: Path,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: Mapping[str, Path],
    tower: Tower,
    shards: list[Shard],
) -> None:
    num_images = sum(len(shard.keys) for shard in shards)
    with tqdm(total=num_images, desc="encode images", unit="image", disable=None) as progress:
        for shard in shards:
            start = time.perf_counter()
            made = encode(shard.keys, images, processor, tower, progress.update)
            if made.failed:
                add_to_quarantine(folder, made.failed, images)
            write_shard(folder, shard.name, made.features, made.grids, fingerprint, time.perf_counter() - start)
