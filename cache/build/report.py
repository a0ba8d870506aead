"""The report of a build, and the two summary files that it updates: the index and `quarantine.jsonl`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.index import read_index, write_index
from lookonce.cache.store.manifest import QUARANTINE, write_quarantine
from lookonce.cache.store.plan import Shard
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import ImageIndex
from lookonce.text import count, duration, size

NUM_NAMED = 5
"""How many failed images the text of a report names."""


@dataclass(frozen=True)
class BuildReport:
    """What `build_cache` did, and the state of the cache after it."""

    folder: Path
    num_wanted: int
    num_encoded: int
    """Number of images that this worker encoded."""
    num_by_others: int
    """Number of images that other workers encoded meanwhile."""
    num_reused: int
    """Number of images that were stored before."""
    num_missing: int
    """Number of images that other workers are still encoding; 0 if the cache is complete."""
    quarantined: dict[str, str]
    """Reasons why wanted images have no features, by key, or by file if the file cannot be read."""
    num_shards: int
    size_bytes: int
    seconds: float
    phases: dict[str, float]
    """Busy seconds by kind of work; they overlap."""

    def text(self) -> str:
        content = f"{count(self.num_shards, 'shard')}, {size(self.size_bytes)}"
        lines = [f"cache {self.folder}: {self._did()}; {content}; {self._state()}"]
        if self.quarantined:
            failed = count(len(self.quarantined), "image")
            lines.append(f"{failed} could not be encoded (see {self.folder / QUARANTINE}):")
            lines += [f"  {reason}" for reason in list(self.quarantined.values())[:NUM_NAMED]]
        return "\n".join(lines)

    def _did(self) -> str:
        reused = f"{self.num_reused:,} of {count(self.num_wanted, 'image')} reused"
        others = [f"{self.num_by_others:,} by other workers"] if self.num_by_others else []
        if not self.num_encoded:
            return ", ".join(["nothing new encoded", *others, reused])
        encoded = [f"encoded {count(self.num_encoded, 'image')} in {duration(self.seconds)}", *others]
        return ", ".join([*encoded, reused] if self.num_reused else encoded)

    def _state(self) -> str:
        if self.num_missing:
            return f"{count(self.num_missing, 'image')} being encoded by other workers"
        return f"complete but for {count(len(self.quarantined), 'image')}" if self.quarantined else "complete"


def report(
    folder: Path,
    fingerprint: Fingerprint,
    images: ImageIndex,
    finished: set[str],
    built: Sequence[Shard],
    phases: dict[str, float],
    seconds: float,
) -> BuildReport:
    """Report on the shards `built`, and update index and quarantine; the images `finished` were done before."""
    if built or read_index(folder, fingerprint.sha256) is None:
        write_index(folder, fingerprint.sha256)
    cache = VisionCache.open(folder)
    write_quarantine(folder, cache.failed, images.unusable)
    encoded = {key for shard in built for key in shard.keys if key in cache}
    wanted = set(images.path_of)
    stored = {key for key in wanted if key in cache}
    failed = {key: cache.failed[key].reason for key in wanted - stored if key in cache.failed}
    return BuildReport(
        folder=folder,
        num_wanted=len(wanted),
        num_encoded=len(encoded & wanted),
        num_by_others=len(stored - finished - encoded),
        num_reused=len(stored & finished - encoded),
        num_missing=len(wanted - stored - failed.keys()),
        quarantined=failed | {str(path): reason for path, reason in images.unusable.items()},
        num_shards=cache.num_shards,
        size_bytes=cache.size_bytes,
        seconds=seconds,
        phases={name: round(value, 3) for name, value in phases.items()},
    )
