"""A run's records and distinct images, and which cache is theirs: all that who only looks needs.

Design: no torch, so `lookonce status` and `cache status` have their answer in half a second where opening the model
takes six; they open it only while its fingerprint is not noted (model_source.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.cache.build.planner import index_of_plan
from lookonce.cache.build.status import StatusReport, status
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.manifest import read_plan
from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Record, read_records
from lookonce.run.config import RunFile
from lookonce.run.model_ref import find_fingerprint

MEGABYTE = 1_000_000
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Content:
    """A run's records and images, and which cache is theirs."""

    run: RunFile
    fingerprint: Fingerprint
    records: dict[str, list[Record]]
    """By split: train, val, test; empty where the run file names none."""
    images: ImageIndex

    @property
    def cache_folder(self) -> Path:
        return self.run.cache.dir / self.fingerprint.folder_name

    @property
    def shard_bytes(self) -> int:
        return self.run.cache.shard_mb * MEGABYTE

    def status(self) -> StatusReport:
        """How much of this run's cache is there."""
        return status(self.cache_folder, self.images.path_of, self.run.cache.claim_s)

    def key_of(self, path: Path) -> str:
        return self.images.key_of[path]

    def cheap_identity(self) -> dict[str, Any]:
        """That part of `Inputs.identity` for which the model need not be read; every image must have a key."""
        return {
            "cache": self.fingerprint.sha256,
            "records": {split: self._hash(part) for split, part in self.records.items() if split != "test"},
        }

    def _hash(self, records: list[Record]) -> str:
        digest = hashlib.sha256()
        for record in records:
            keys = [self.key_of(path) for path in record.images]
            digest.update(repr((keys, record.turns, record.system)).encode())
        return digest.hexdigest()


def find_content(run: RunFile) -> Content:
    """Read the records, take the keys of images from the cache's plan, and hash what it does not name.

    Raises:
        LookonceError: whatever of it is missing or broken.
    """
    records, fingerprint = read_splits(run), find_fingerprint(run)
    return Content(run, fingerprint, records, find_images(run, fingerprint, records, trust_plan=True))


def read_splits(run: RunFile) -> dict[str, list[Record]]:
    """The records of a run, by split: train, val, test."""
    return {split: list(read_split(run, split)) for split in SPLITS}


def read_split(run: RunFile, split: str) -> Iterator[Record]:
    """The records of one of them."""
    for path in getattr(run.data, split):
        yield from read_records(path, run.data.image_root, form=run.data.format)


def find_images(
    run: RunFile, fingerprint: Fingerprint, records: dict[str, list[Record]], *, trust_plan: bool
) -> ImageIndex:
    """The images of a run's records; `trust_plan` does not read those that the cache's plan names."""
    everything = [record for part in records.values() for record in part]
    known = None
    if trust_plan:
        plan = read_plan(run.cache.dir / fingerprint.folder_name)
        known = index_of_plan(plan, (path for record in everything for path in record.images))
    return index_images(everything, known)
