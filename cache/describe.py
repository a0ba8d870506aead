"""What a cache will be and what it is, for people: the reports behind `cache plan` and `cache status`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lookonce.cache.build import planned_tokens, settled_images
from lookonce.cache.encode import NUM_READERS
from lookonce.cache.fingerprint import Fingerprint
from lookonce.cache.folder import MANIFEST, read_quarantine
from lookonce.cache.pixels import ImageProcessor, read_size
from lookonce.cache.plan import Plan
from lookonce.cache.read import VisionCache
from lookonce.text import count, duration, rows, size


@dataclass(frozen=True)
class PlanReport:
    """What building would do."""

    folder: Path
    num_files: int
    num_images: int
    num_done: int
    mean_tokens: float
    max_tokens: int
    num_bytes: int
    """Of all these images, from their headers."""
    num_new_shards: int
    free_bytes: int

    def text(self) -> str:
        return rows(
            [
                (
                    "images",
                    f"{count(self.num_files, 'file')}, {self.num_images:,} distinct, {self.num_done:,} encoded already",
                ),
                ("tokens", f"{self.mean_tokens:.0f} an image, at most {self.max_tokens:,}"),
                ("size", f"{size(self.num_bytes)}; {size(self.free_bytes)} free there"),
                ("to do", count(self.num_new_shards, "shard")),
                ("folder", str(self.folder)),
            ]
        )


@dataclass(frozen=True)
class StatusReport:
    """What is there."""

    folder: Path
    num_images: int
    num_done: int
    num_quarantined: int
    num_shards: int
    num_bytes: int
    encode_seconds: float

    def text(self) -> str:
        missing = self.num_images - self.num_done - self.num_quarantined
        state = "complete" if missing == 0 else f"{missing:,} still to encode"
        return rows(
            [
                ("images", f"{self.num_done:,} of {self.num_images:,} encoded, {state}"),
                ("quarantined", f"{self.num_quarantined:,}"),
                ("shards", f"{self.num_shards:,}, {size(self.num_bytes)}, made in {duration(self.encode_seconds)}"),
                ("folder", str(self.folder)),
            ]
        )


def describe_plan(
    folder: Path,
    plan: Plan,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: Mapping[str, Path],
    num_files: int,
) -> PlanReport:
    """Describe what building `plan` for `images` (key to file) would do; reads image headers."""
    with ThreadPoolExecutor(NUM_READERS) as threads:
        tokens = [planned_tokens(processor, found) for found in threads.map(read_size, images.values())]
    have = settled_images(folder)
    return PlanReport(
        folder=folder,
        num_files=num_files,
        num_images=len(images),
        num_done=len((images.keys() & have) - read_quarantine(folder).keys()),
        mean_tokens=sum(tokens) / max(len(tokens), 1),
        max_tokens=max(tokens, default=0),
        num_bytes=sum(tokens) * fingerprint.bytes_per_token,
        num_new_shards=sum(not have.issuperset(shard.keys) for shard in plan.shards),
        free_bytes=shutil.disk_usage(_existing(folder)).free,
    )


def describe_status(folder: Path, images: Mapping[str, Path]) -> StatusReport:
    """Describe how many of `images` (key to file) the cache in `folder` holds; it need not exist."""
    if not (folder / MANIFEST).exists():
        return StatusReport(folder, len(images), 0, 0, 0, 0, 0.0)
    cache = VisionCache.open(folder)
    done = {key for key in images if key in cache}
    quarantined = (images.keys() & cache.quarantined.keys()) - done
    return StatusReport(
        folder, len(images), len(done), len(quarantined), cache.num_shards, cache.size_bytes, cache.encode_seconds
    )


def _existing(folder: Path) -> Path:
    """The closest folder above that is there already."""
    folder = folder.absolute()
    return folder if folder.exists() else _existing(folder.parent)
