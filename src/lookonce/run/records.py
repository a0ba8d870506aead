"""A run's records and distinct images, and the cache they belong to: all that read-only commands need.

Design: no torch, so `lookonce status` and `cache status` answer in half a second, where opening the model takes six.
They open it only if its fingerprint has not been recorded (model_ref.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lookonce.cache.build.planner import index_from_plan
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
class RunRecords:
    """A run's records and images, and the cache they belong to."""

    run: RunFile
    fingerprint: Fingerprint
    records: dict[str, list[Record]]
    """Records by split (train, val, test); a split that the run file does not name is empty."""
    images: ImageIndex

    @property
    def cache_folder(self) -> Path:
        return self.run.cache.dir / self.fingerprint.folder_name

    @property
    def shard_bytes(self) -> int:
        return self.run.cache.shard_mb * MEGABYTE

    def status(self) -> StatusReport:
        """How much of this run's cache is built."""
        return status(self.cache_folder, self.images.path_of, self.run.cache.claim_s)

    def all_records(self) -> Iterator[Record]:
        """The records of all splits."""
        return chain.from_iterable(self.records.values())

    def key_of(self, path: Path) -> str:
        return self.images.key_of[path]

    def cheap_identity(self) -> dict[str, Any]:
        """The entries of `RunInputs.identity` that do not need the model; every image must have a key."""
        return {
            "cache": self.fingerprint.sha256,
            "records": {split: self._hash(records) for split, records in self.records.items() if split != "test"},
        }

    def _hash(self, records: list[Record]) -> str:
        digest = hashlib.sha256()
        for record in records:
            keys = [self.key_of(path) for path in record.images]
            digest.update(repr((keys, record.turns, record.system)).encode())
        return digest.hexdigest()


def open_records(run: RunFile) -> RunRecords:
    """Read the records; take image keys from the cache's plan, and hash images that it does not name.

    Raises:
        LookonceError: records or model are missing or broken.
    """
    records, fingerprint = read_splits(run), find_fingerprint(run)
    return RunRecords(run, fingerprint, records, find_images(run, fingerprint, records, trust_plan=True))


def read_splits(run: RunFile) -> dict[str, list[Record]]:
    """The records of a run, by split: train, val, test."""
    return {split: list(read_split(run, split)) for split in SPLITS}


def read_split(run: RunFile, split: str) -> Iterator[Record]:
    """The records of one split."""
    for path in getattr(run.data, split):
        yield from read_records(path, run.data.image_root, format=run.data.format)


def find_images(
    run: RunFile, fingerprint: Fingerprint, records: dict[str, list[Record]], *, trust_plan: bool
) -> ImageIndex:
    """The images of a run's records; with `trust_plan` those that the cache's plan names are not read."""
    everything = list(chain.from_iterable(records.values()))
    known = None
    if trust_plan:
        plan = read_plan(run.cache.dir / fingerprint.folder_name)
        known = index_from_plan(plan, (path for record in everything for path in record.images))
    return index_images(everything, known)
