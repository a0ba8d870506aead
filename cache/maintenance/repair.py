"""Repair a damaged cache: restore what can be restored, and remove the rest, which the next build encodes again.

Design: a shard is removed only after each of its images was found again, with the right bytes, in the files of the run
or in those that the plan names. A repair owns the cache: it is refused while another process uses it. The index is
removed first and the receipt last: an interrupted repair leaves a receipt without its shard, which the next repair
finds, and never a damaged shard that looks as if it had only lost its receipt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookonce.cache.constants import BUILD_COMMAND, VERIFY_COMMAND
from lookonce.cache.maintenance.checks import Problem
from lookonce.cache.maintenance.damaged import ImageFiles, find_files, images_elsewhere, images_of_shard
from lookonce.cache.maintenance.rebuild import is_confirmed, rebuild_plan, rebuild_receipt
from lookonce.cache.maintenance.verify import Level, check_manifest, check_plan, verify, verify_shard
from lookonce.cache.store.claims import owning
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.index import INDEX, INDEX_CHECKSUM, write_index
from lookonce.cache.store.manifest import MANIFEST, ensure_manifest
from lookonce.cache.store.plan import Plan, Shard
from lookonce.cache.store.receipts import Receipt, finished_shards, receipt_path, to_text, write_receipt
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.claim_file import EXPIRY_S
from lookonce.datasets.images import ImageIndex
from lookonce.errors import CacheCorrupt, CacheError
from lookonce.files import write_text
from lookonce.text import count, listed


@dataclass
class RepairReport:
    """What was damaged, and what was done about it."""

    folder: Path
    level: Level
    num_problems: int = 0
    mended: list[str] = field(default_factory=list)
    """Files that were written again: manifest, plan, receipts of intact shards."""
    adopted: list[str] = field(default_factory=list)
    """Shards of a cache that had lost all receipts, which got new receipts."""
    removed: list[str] = field(default_factory=list)
    """Damaged shards that were removed."""
    num_again: int = 0
    """Number of images to encode again."""
    lost: list[str] = field(default_factory=list)
    """Images of removed shards that were not found again."""
    left: dict[str, str] = field(default_factory=dict)
    """What stays damaged, and why."""

    def text(self) -> str:
        what = f"{count(self.num_problems, 'problem')} found" if self.num_problems else "nothing to repair"
        lines = [f"cache {self.folder}: {what}"]
        if self.mended:
            lines.append(f"  restored: {listed(self.mended)}")
        if self.adopted:
            lines.append(
                f"  all receipts were lost and are restored from {count(len(self.adopted), 'shard')}; only the tower "
                f"can tell whether features have changed: {VERIFY_COMMAND} --level recompute"
            )
        if self.removed:
            again = f"{count(self.num_again, 'image')} to encode again"
            lines.append(f"  removed {count(len(self.removed), 'damaged shard')} ({listed(self.removed)}): {again}")
        if self.lost:
            lines.append(f"  lost {count(len(self.lost), 'image')}, whose files were not found: {listed(self.lost)}")
        lines += [f"  did not repair {name}: {why}" for name, why in self.left.items()]
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
    """Repair the cache of a run; also returns the images that must be encoded again.

    `images` are the run's. `level` says how to look for damage. `drop` removes damaged shards even if some of their
    images are not found again. `provenance` is for a manifest that must be written again.

    Raises:
        CacheError: the folder has no shards, or another process uses it.
        CacheMismatch: the folder holds another cache.
    """
    if not (folder / SHARDS).exists():
        raise CacheError(f"{folder} holds no shards to repair; make them with: {BUILD_COMMAND}")
    with owning(folder, "lookonce cache repair", expiry_s) as check_owned:
        work = _Repair(RepairReport(folder, level), fingerprint, images, drop, check_owned)
        work.restore_manifest(provenance or {})
        if not finished_shards(folder):
            work.adopt_shards()
        found = verify(folder, level)
        work.report.num_problems += len(found.problems)
        work.restore_receipts(found.problems)
        work.restore_plan()
        work.remove(found.damaged)
        check_owned()
        work.write_index()
        return work.report, work.images_to_encode()


class _Repair:
    """A repair in progress; `report` is filled on the way."""

    def __init__(
        self,
        report: RepairReport,
        fingerprint: Fingerprint,
        images: ImageIndex,
        drop: bool,
        check_owned: Callable[[], None],
    ) -> None:
        self.report, self._folder = report, report.folder
        self._fingerprint, self._images, self._drop, self._check_owned = fingerprint, images, drop, check_owned
        self._to_encode: ImageFiles = {}

    def restore_manifest(self, provenance: Mapping[str, Any]) -> None:
        """Write the manifest again if it is missing or broken."""
        path = self._folder / MANIFEST
        if path.exists() and check_manifest(self._folder)[1]:
            path.unlink()
        if not path.exists():
            self.report.num_problems += 1
            self.report.mended.append(MANIFEST)
        ensure_manifest(self._folder, self._fingerprint, provenance)

    def adopt_shards(self) -> None:
        """Write receipts for all shards, in a cache that has none left."""
        for path in sorted((self._folder / SHARDS).glob("*.safetensors")):
            receipt = self._rebuild_receipt(path.stem)
            self._check_owned()
            if receipt and write_receipt(self._folder, receipt):
                self.report.adopted.append(path.stem)
                self.report.num_problems += 1

    def restore_receipts(self, problems: Iterable[Problem]) -> None:
        """Write broken receipts again if their shards prove to be intact."""
        for name in dict.fromkeys(problem.shard for problem in problems if problem.part == "receipt"):
            receipt, path = self._rebuild_receipt(name), receipt_path(self._folder, name)
            if receipt and path.exists() and is_confirmed(receipt, path.read_bytes()):
                self._check_owned()
                self._remove_index()
                write_text(path, to_text(receipt))
                self.report.mended.append(path.name)

    def _rebuild_receipt(self, name: str) -> Receipt | None:
        """A receipt made from the shard, if the shard is complete."""
        try:
            return rebuild_receipt(self._folder, name, self._fingerprint)
        except (CacheCorrupt, OSError):
            return None

    def restore_plan(self) -> None:
        """Write broken and lost plan files again."""
        if not self._check_plan()[1]:
            return
        self._check_owned()
        file_of = {key: path for path, key in self._images.key_of.items()}
        self.report.mended += [path.name for path in rebuild_plan(self._folder, file_of)]

    def _check_plan(self) -> tuple[Plan, list[Problem]]:
        return check_plan(self._folder, finished_shards(self._folder))

    def remove(self, shards: Iterable[str]) -> None:
        """Remove those of these shards that are still damaged and whose images were found again."""
        damaged = [name for name in shards if f"{name}.json" not in self.report.mended]
        planned = {shard.name: shard for shard in self._check_plan()[0].shards} if damaged else {}
        for name in damaged:
            if self._is_damaged(name):  # it may have been restored since it was verified
                self._remove(planned.get(name, Shard(name, ())), set(damaged))

    def _is_damaged(self, name: str) -> bool:
        sha256, level = self._fingerprint.sha256, self.report.level
        return bool(verify_shard(self._folder, name, self._fingerprint, sha256, level)[1])

    def _remove(self, shard: Shard, damaged: set[str]) -> None:
        needed = images_of_shard(self._folder, shard)
        found = find_files({*(needed or ()), *shard.keys}, shard, self._images)
        lost = sorted((needed or set()) - found.keys())
        lost = sorted(set(lost) - images_elsewhere(self._folder, damaged)) if lost else []
        if (lost or needed is None) and not self._drop:
            self.report.left[shard.name] = _why_left(needed, lost)
            return
        self._check_owned()
        self._remove_index()
        shard_path(self._folder, shard.name).unlink(missing_ok=True)
        receipt_path(self._folder, shard.name).unlink(missing_ok=True)
        self._to_encode |= found
        self.report.num_again = len(self._to_encode)
        self.report.lost += lost
        self.report.removed.append(shard.name)

    def _remove_index(self) -> None:
        for name in (INDEX, INDEX_CHECKSUM):
            (self._folder / name).unlink(missing_ok=True)

    def write_index(self) -> None:
        """Bring the index up to date, unless a receipt stays broken."""
        with contextlib.suppress(CacheCorrupt):
            write_index(self._folder, self._fingerprint.sha256)

    def images_to_encode(self) -> ImageIndex:
        """The images of removed shards that were found again."""
        return ImageIndex(
            key_of={path: key for key, (path, _) in self._to_encode.items()},
            path_of={key: path for key, (path, _) in self._to_encode.items()},
            size_of={key: size for key, (_, size) in self._to_encode.items()},
            unusable=self._images.unusable,
        )


def _why_left(needed: set[str] | None, lost: list[str]) -> str:
    if needed is None:
        return "which images it holds is unknown; --drop removes it"
    return (
        f"the files of {len(lost):,} of its {count(len(needed), 'image')} were not found: {listed(lost)}; restore "
        "them, or remove the shard and lose these images with --drop"
    )
