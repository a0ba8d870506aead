"""Build a cache: plan it, then make each shard that is not there yet.

Design: the unit of work is a shard. A run that was killed leaves finished shards, which are kept, and at most one
unfinished one, which is made again. Images are decoded and cut into patches a few ahead on threads while the tower
encodes; each goes through the tower alone, so its features do not depend on its neighbours. An image that can not be
encoded is quarantined with its reason and the build goes on.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lookonce.cache.fingerprint import FORMAT_VERSION, Fingerprint
from lookonce.cache.pixels import ImageProcessor, read_size
from lookonce.cache.plan import Plan, Shard
from lookonce.cache.read import MANIFEST, PLAN, QUARANTINE, VisionCache, read_manifest, read_quarantine
from lookonce.cache.shards import Grid, read_receipts, write_shard
from lookonce.cache.tower import Tower
from lookonce.errors import CacheMismatch, ImageError
from lookonce.files import write_json, write_text
from lookonce.text import count, duration, size

NUM_READERS = 4
"""Threads that decode and patch images ahead of the tower."""
NUM_NAMED = 5
"""How many failed images a report names."""
LIBRARIES = ("lookonce", "torch", "transformers", "pillow", "safetensors")


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
        did = (
            f"encoded {count(self.num_encoded, 'image')} in {duration(self.seconds)}"
            if self.num_encoded
            else "nothing to encode"
        )
        reused = f", {self.num_reused:,} of {self.num_wanted:,} reused" if self.num_reused else ""
        lines = [f"cache {self.folder}: {did}{reused}; {count(self.num_shards, 'shard')}, {size(self.size_bytes)}"]
        if self.quarantined:
            lines.append(
                f"{count(len(self.quarantined), 'image')} could not be encoded (see {self.folder / QUARANTINE}):"
            )
            lines += [f"  {reason}" for reason in list(self.quarantined.values())[:NUM_NAMED]]
        return "\n".join(lines)


def make_plan(
    folder: Path, fingerprint: Fingerprint, processor: ImageProcessor, images: Mapping[str, Path], shard_bytes: int
) -> Plan:
    """The plan of a cache, extended by those of `images` (key to file) that no shard can give.

    A shard can give an image if it is finished, or if all its images are among `images`, so that it can be made.
    """
    plan = read_plan(folder)
    have = finished_images(folder)
    to_come = {key for shard in plan.shards if _can_be_made(shard, have, images) for key in shard.keys}
    new = sorted(images.keys() - have - to_come)
    if not new:
        return plan
    with ThreadPoolExecutor(NUM_READERS) as threads:
        sizes = threads.map(read_size, (images[key] for key in new))
        num_tokens = [planned_tokens(processor, size) for size in sizes]
    size_of = {key: count * fingerprint.bytes_per_token for key, count in zip(new, num_tokens, strict=True)}
    return plan.extended(size_of, shard_bytes)


def read_plan(folder: Path) -> Plan:
    path = folder / PLAN
    return Plan.from_json(json.loads(path.read_text())) if path.exists() else Plan()


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
    """
    start = time.perf_counter()
    folder = root / fingerprint.folder_name
    _write_manifest(folder, fingerprint, provenance)
    plan = make_plan(folder, fingerprint, processor, images, shard_bytes)
    if plan != read_plan(folder):
        write_json(folder / PLAN, plan.to_json())
    have = finished_images(folder)
    pending = [shard for shard in plan.shards if _can_be_made(shard, have, images)]
    if pending:
        _encode(folder, fingerprint, processor, images, load_tower(), pending)
    cache = VisionCache.open(folder)
    return BuildReport(
        folder=folder,
        num_wanted=len(images),
        num_encoded=sum(key in images for shard in pending for key in shard.keys if key in cache),
        num_reused=len(images.keys() & have),
        quarantined={key: reason for key, reason in cache.quarantined.items() if key in images and key not in cache},
        num_shards=cache.num_shards,
        size_bytes=cache.size_bytes,
        seconds=time.perf_counter() - start,
    )


def _can_be_made(shard: Shard, have: set[str], images: Mapping[str, Path]) -> bool:
    return not have.issuperset(shard.keys) and images.keys() >= set(shard.keys)


def finished_images(folder: Path) -> set[str]:
    """The images whose features are there, and those known to be impossible."""
    keys = {key for receipt in read_receipts(folder) for key in receipt.entries}
    return keys | read_quarantine(folder).keys()


def planned_tokens(processor: ImageProcessor, size: tuple[int, int] | None) -> int:
    """From the header; an image that has none, or of an impossible shape, is planned as nothing and found out later."""
    try:
        return processor.num_tokens(*size) if size else 0
    except ValueError:
        return 0


def _write_manifest(folder: Path, fingerprint: Fingerprint, provenance: Mapping[str, Any]) -> None:
    if (folder / MANIFEST).exists():
        found = read_manifest(folder)
        if found != fingerprint:
            raise CacheMismatch(
                f"{folder} says that it was made from something else: {found.differences(fingerprint)[0]}"
            )
        return
    manifest = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint.to_json(),
        "sha256": fingerprint.sha256,
        "provenance": {
            **provenance,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES},
        },
    }
    write_json(folder / MANIFEST, manifest)


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
            features, grids, failed = _encode_shard(shard, processor, images, tower, progress)
            if failed:
                _quarantine(folder, failed, images)
            write_shard(folder, shard.name, features, grids, fingerprint, time.perf_counter() - start)


def _encode_shard(
    shard: Shard, processor: ImageProcessor, images: Mapping[str, Path], tower: Tower, progress: Any
) -> tuple[dict[str, torch.Tensor], dict[str, Grid], dict[str, str]]:
    """Features and grids of a shard's images, and the reasons of those that failed."""
    features: dict[str, torch.Tensor] = {}
    grids: dict[str, Grid] = {}
    failed: dict[str, str] = {}
    read = _ahead(lambda key: processor.read(images[key]), shard.keys)
    for key, result in zip(shard.keys, read, strict=True):
        progress.update()
        try:
            patches, grid = result.result()
        except ImageError as error:
            failed[key] = str(error)
            continue
        encoded = tower.encode(patches, [grid])[0].cpu()
        if not torch.isfinite(encoded).all():
            failed[key] = f"the tower's features of {images[key]} are not finite"
            continue
        features[key], grids[key] = encoded, grid
    return features, grids, failed


def _ahead(function: Callable[[str], Any], keys: Iterable[str]) -> Iterator[Future[Any]]:
    """Futures of `function(key)` in order, computed on threads a few ahead of where the caller is."""
    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(NUM_READERS) as threads:
        for key in keys:
            waiting.append(threads.submit(function, key))
            if len(waiting) > 2 * NUM_READERS:
                yield waiting.popleft()
        yield from waiting


def _quarantine(folder: Path, failed: Mapping[str, str], images: Mapping[str, Path]) -> None:
    path = folder / QUARANTINE
    before = path.read_text() if path.exists() else ""
    lines = [json.dumps({"key": key, "file": str(images[key]), "reason": reason}) for key, reason in failed.items()]
    write_text(path, before + "".join(f"{line}\n" for line in lines))
