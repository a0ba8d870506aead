"""Mend a damaged cache: what can be put together from what is there is, what can not is removed, to be made again.

Design: nothing is removed before each of its images has been found again and its bytes compared with its key, in the
files of the run or in those that the plan names. What is removed is claimed first, as if to make it, so no living
worker's shard is touched. The index goes first and the receipt last: an interrupted repair leaves a receipt without its
shard, which the next one finds, and never a damaged shard that looks as if it had only lost its receipt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookonce.cache.constants import BUILD_COMMAND, REPAIR_COMMAND, VERIFY_COMMAND
from lookonce.cache.maintenance.checks import Problem, parse_header
from lookonce.cache.maintenance.rebuild import is_confirmed, mend_plan, receipt_of_shard
from lookonce.cache.maintenance.verify import (
    Level,
    VerifyReport,
    check_manifest,
    check_plan,
    named,
    verify,
    verify_shard,
)
from lookonce.cache.store.claims import EXPIRY_S, Claims, Worker, works
from lookonce.cache.store.dtypes import SCALE_SUFFIX
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.index import INDEX, INDEX_CHECKSUM, write_index
from lookonce.cache.store.manifest import BROKEN, MANIFEST, settle
from lookonce.cache.store.plan import Plan, Shard
from lookonce.cache.store.receipts import Receipt, finished_shards, read_receipt, receipt_path, to_text, write_receipt
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.datasets.images import ImageIndex, Size, bytes_key, image_size, read_many
from lookonce.errors import CacheCorrupt, CacheError, ImageError
from lookonce.files import write_text
from lookonce.text import count

MAX_HEADER_BYTES = 100_000_000
"""What safetensors allows."""


@dataclass(frozen=True)
class RepairReport:
    """What was wrong, and what has become of it."""

    folder: Path
    level: Level
    num_problems: int
    mended: list[str] = field(default_factory=list)
    """Files written anew: manifest, plan, receipts of sound shards."""
    adopted: list[str] = field(default_factory=list)
    """Shards of a cache that had lost all receipts: taken as they are."""
    removed: list[str] = field(default_factory=list)
    """Damaged shards."""
    num_again: int = 0
    """Images to be encoded again."""
    lost: list[str] = field(default_factory=list)
    """Images that are nowhere to be had again."""
    left: dict[str, str] = field(default_factory=dict)
    """What stays damaged, and why."""

    def text(self) -> str:
        lines = [f"cache {self.folder}: {self._what()}"]
        if self.mended:
            lines.append(f"  written anew: {named(self.mended)}")
        if self.adopted:
            lines.append(
                f"  all receipts were lost and are written anew from {count(len(self.adopted), 'shard')}; whether "
                f"features have changed meanwhile only the tower can tell: {VERIFY_COMMAND} --level recompute"
            )
        if self.removed:
            again = f"{count(self.num_again, 'image')} to encode again"
            lines.append(f"  removed {count(len(self.removed), 'damaged shard')} ({named(self.removed)}): {again}")
        if self.lost:
            lines.append(f"  lost {count(len(self.lost), 'image')}, nowhere to be had again: {named(self.lost)}")
        lines += [f"  left {name} as it is: {why}" for name, why in self.left.items()]
        return "\n".join(lines)

    def _what(self) -> str:
        if not self.num_problems:
            return "nothing to mend"
        return f"{count(self.num_problems, 'problem')} found"


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
    """Mend the cache of a run, or clear away what must be made again; gives also the images that are to be built then.

    `images` are the run's. `drop` removes damaged shards even if some of their images are nowhere to be had again.
    `level` says how to look for damage, `provenance` goes into a manifest that must be written anew.

    Raises:
        CacheError: there is no cache.
        CacheMismatch: it is another one.
    """
    if not (folder / SHARDS).exists():
        raise CacheError(f"{folder} holds no shards to repair; make them with: {BUILD_COMMAND}")
    with Claims(folder, Worker.this_process("repair"), expiry_s) as claims:
        work = _Repair(folder, fingerprint, images, drop, claims)
        work.mend_manifest(provenance or {})
        if not finished_shards(folder):
            work.adopt_all()
        found = verify(folder, level)
        work.mend_receipts(found.problems)
        work.mend_plan()
        work.remove(found)
        work.write_index()
        return work.report(found), work.again()


class _Repair:
    """A repair under way."""

    def __init__(self, folder: Path, fingerprint: Fingerprint, images: ImageIndex, drop: bool, claims: Claims) -> None:
        self._folder, self._fingerprint, self._images = folder, fingerprint, images
        self._drop, self._claims = drop, claims
        self._mended: list[str] = []
        self._adopted: list[str] = []
        self._removed: list[str] = []
        self._left: dict[str, str] = {}
        self._lost: list[str] = []
        self._found: dict[str, tuple[Path, Size | None]] = {}
        self._num_problems = 0

    def mend_manifest(self, provenance: Mapping[str, Any]) -> None:
        """Write the manifest anew if it is missing or broken."""
        path = self._folder / MANIFEST
        if path.exists() and check_manifest(self._folder)[1]:
            path.unlink()
        if not path.exists():
            self._num_problems += 1
            self._mended.append(MANIFEST)
        settle(self._folder, self._fingerprint, provenance)

    def adopt_all(self) -> None:
        """Write the receipts of all shards, of which there are none any more."""
        for path in sorted((self._folder / SHARDS).glob("*.safetensors")):
            with self._claim(path.stem) as is_ours:
                receipt = self._salvage(path.stem) if is_ours else None
                if receipt and write_receipt(self._folder, receipt):
                    self._adopted.append(path.stem)
                    self._num_problems += 1

    def mend_receipts(self, problems: Iterable[Problem]) -> None:
        """Write broken receipts anew where the shard turns out to be what it was."""
        for name in dict.fromkeys(problem.shard for problem in problems if problem.part == "receipt"):
            with self._claim(name) as is_ours:
                receipt, path = self._salvage(name) if is_ours else None, receipt_path(self._folder, name)
                if receipt and path.exists() and is_confirmed(receipt, path.read_bytes()):
                    self._remove_index()
                    write_text(path, to_text(receipt))
                    self._mended.append(path.name)

    def _salvage(self, name: str) -> Receipt | None:
        """The receipt that a shard itself makes, if it is whole."""
        try:
            return receipt_of_shard(self._folder, name, self._fingerprint)
        except (CacheCorrupt, OSError):
            return None

    def mend_plan(self) -> None:
        """Write broken and lost parts of the plan anew, unless a worker may be about to add to it."""
        if not self._check_plan()[1]:
            return
        if any(alive for _, _, alive in works(self._folder, self._claims.expiry_s)):
            self._left["the plan"] = f"workers are alive; when they have ended run again: {REPAIR_COMMAND}"
            return
        file_of = {key: path for path, key in self._images.key_of.items()}
        self._mended += [path.name for path in mend_plan(self._folder, file_of)]

    def _check_plan(self) -> tuple[Plan, list[Problem]]:
        return check_plan(self._folder, finished_shards(self._folder))

    def remove(self, found: VerifyReport) -> None:
        """Remove the shards that are damaged still, each if its images can be had again."""
        damaged = [name for name in found.damaged if f"{name}.json" not in self._mended]
        planned = {shard.name: shard for shard in self._check_plan()[0].shards} if damaged else {}
        for name in damaged:
            with self._claim(name) as is_ours:
                if is_ours and self._is_damaged(name, found.level):  # and not mended by another since we looked
                    self._remove(name, planned.get(name, Shard(name, ())), set(damaged))

    def _is_damaged(self, name: str, level: Level) -> bool:
        return bool(verify_shard(self._folder, name, self._fingerprint, self._fingerprint.sha256, level)[1])

    def _remove(self, name: str, planned: Shard, damaged: set[str]) -> None:
        needed = self._content(name, planned)
        found = self._find({*(needed or ()), *planned.keys}, planned)
        lost = sorted((needed or set()) - found.keys())
        lost = sorted(set(lost) - self._held_by_others(damaged)) if lost else []
        if (lost or needed is None) and not self._drop:
            self._left[name] = _why_left(needed, lost)
            return
        self._remove_index()
        shard_path(self._folder, name).unlink(missing_ok=True)
        receipt_path(self._folder, name).unlink(missing_ok=True)
        self._found |= found
        self._lost += lost
        self._removed.append(name)

    def _content(self, name: str, planned: Shard) -> set[str] | None:
        """The images that a damaged shard has, or at most can have; None if that is not known."""
        with contextlib.suppress(CacheCorrupt, OSError, *BROKEN):
            return set(read_receipt(self._folder, name).images)
        if planned.images:
            return set(planned.keys)
        with contextlib.suppress(OSError, ValueError), shard_path(self._folder, name).open("rb") as file:
            found, _, _ = parse_header(file.read(MAX_HEADER_BYTES))
            return {key.removesuffix(SCALE_SUFFIX) for key in found}
        return None

    def _find(self, keys: set[str], planned: Shard) -> dict[str, tuple[Path, Size | None]]:
        """A file of each image that still has its bytes, in the run's files or else in the plan's."""
        found: dict[str, tuple[Path, Size | None]] = {}
        of_run = {self._images.path_of[key] for key in keys if key in self._images.path_of}
        for paths in (of_run, {Path(file) for image in planned.images for file in image.files} - of_run):
            if keys <= found.keys():
                break
            for path, data in read_many(sorted(paths)):
                if not isinstance(data, ImageError) and (key := bytes_key(data)) in keys:
                    found.setdefault(key, (path, image_size(data)))
        return found

    def _held_by_others(self, damaged: set[str]) -> set[str]:
        """The images of all shards that are not damaged."""
        held: set[str] = set()
        for name in finished_shards(self._folder):
            if name not in damaged:
                with contextlib.suppress(CacheCorrupt, FileNotFoundError, *BROKEN):
                    held |= read_receipt(self._folder, name).images.keys()
        return held

    @contextlib.contextmanager
    def _claim(self, name: str) -> Iterator[bool]:
        """Whether the shard is ours for as long as this lasts."""
        claim = self._claims.take(name, 0)
        if claim is None:
            self._left[name] = "a worker has it in work"
        else:
            self._left.pop(name, None)
        try:
            yield claim is not None
        finally:
            if claim:
                self._claims.release(claim)

    def _remove_index(self) -> None:
        for name in (INDEX, INDEX_CHECKSUM):
            (self._folder / name).unlink(missing_ok=True)

    def write_index(self) -> None:
        """Bring the index up to date, unless a receipt stays broken."""
        with contextlib.suppress(CacheCorrupt):
            write_index(self._folder, self._fingerprint.sha256)

    def again(self) -> ImageIndex:
        """What must be built to have all images back."""
        return ImageIndex(
            key_of={path: key for key, (path, _) in self._found.items()},
            path_of={key: path for key, (path, _) in self._found.items()},
            size_of={key: size for key, (_, size) in self._found.items()},
            unusable=self._images.unusable,
        )

    def report(self, found: VerifyReport) -> RepairReport:
        return RepairReport(
            folder=self._folder,
            level=found.level,
            num_problems=self._num_problems + len(found.problems),
            mended=self._mended,
            adopted=self._adopted,
            removed=self._removed,
            num_again=len(self._found),
            lost=self._lost,
            left=self._left,
        )


def _why_left(needed: set[str] | None, lost: list[str]) -> str:
    if needed is None:
        return "nothing tells which images it holds; --drop removes it"
    return (
        f"{len(lost):,} of its {count(len(needed), 'image')} can not be had again: {named(lost)}; bring their files "
        "back, or remove the shard and lose them with --drop"
    )
