"""Repair a damaged cache: restore what can be restored, and remove the rest, which the next build encodes again.

Design: a shard is removed only after each of its images was found again, with the right bytes, in the files of the run
or in those that the plan names, or in other shards. A repair owns the cache: it is refused while another process uses
it. The index is removed first and the receipt last: an interrupted repair leaves a receipt without its shard, which the
next repair finds, and never a damaged shard that looks as if it had only lost its receipt.

The header of a shard has the names, shapes, offsets and grids of its images, so a lost or broken receipt can be written
again, and from receipts the plan. What only the receipt had is lost: which images failed (they are tried again), norms,
peaks and times. The new checksums are those of the file as it is now, which does not prove that its bytes are intact.
`is_confirmed` does: it finds the new checksums in what is left of the old receipt.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookonce.cache.format import BUILD_COMMAND, PARSE_ERRORS, SCALE_SUFFIX, VERIFY_COMMAND
from lookonce.cache.maintenance.verify import (
    Level,
    Problem,
    Region,
    check_header,
    check_manifest,
    check_offsets,
    check_plan,
    checksum,
    regions,
    shard_header,
    verify,
    verify_shard,
)
from lookonce.cache.store.claims import owning
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    MANIFEST,
    PlannedImage,
    Receipt,
    Shard,
    ensure_manifest,
    finished_shards,
    plan_path,
    plan_text,
    read_plan_file,
    read_receipt,
    receipt_of,
    receipt_path,
    shard_name,
    shard_number,
    to_text,
    write_receipt,
)
from lookonce.cache.store.reader import INDEX, INDEX_CHECKSUM, write_index
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.claim_file import EXPIRY_S
from lookonce.datasets.images import ImageIndex, Size, bytes_key, image_size, read_many
from lookonce.errors import CacheCorrupt, CacheError, ImageError
from lookonce.files import write_text
from lookonce.text import count, listed

ImageFiles = dict[str, tuple[Path, Size | None]]
"""A file and the image size for each image key."""


def rebuild_receipt(folder: Path, name: str, fingerprint: Fingerprint) -> Receipt:
    """A receipt made from the shard alone, with the checksums of its current bytes.

    Raises:
        CacheCorrupt: the file is not a complete shard of this cache.
        OSError: it is missing or cannot be read.
    """
    path = shard_path(folder, name)
    with path.open("rb", buffering=0) as file:
        stat = os.fstat(file.fileno())
        try:
            found, metadata, header_bytes = shard_header(path)
            receipt = receipt_of(
                {
                    "shard": name,
                    "fingerprint": fingerprint.sha256,
                    "size_bytes": stat.st_size,
                    "header_bytes": header_bytes,
                    "header_xxh3_64": checksum(file, Region("", 0, header_bytes)),
                    "host": "",
                    "finished": round(stat.st_mtime, 3),
                    "seconds": 0.0,
                    "images": _entries(found, metadata["grid_thw"], header_bytes),
                }
            )
        except PARSE_ERRORS as error:
            raise CacheCorrupt(f"the header of {path} is broken ({error})") from None
        problems = [*check_offsets(receipt), *check_header(path, receipt, fingerprint)]
        if problems:
            raise CacheCorrupt(f"{path} is not a complete shard of this cache ({problems[0].what})")
        digest_of = {region.key: checksum(file, region) for region in regions(receipt)}
    images = {key: replace(entry, xxh3_64=digest_of[key]) for key, entry in receipt.images.items()}
    return replace(receipt, images=images)


def _entries(found: dict[str, Any], grids: dict[str, Any], header_bytes: int) -> dict[str, dict[str, Any]]:
    """The images of a receipt, by the tensors of a header and the patch grids, without their checksums."""
    entries = {}
    for name, about in sorted(found.items()):
        if not name.endswith(SCALE_SUFFIX):
            begin, _ = about["data_offsets"]
            _, end = found.get(name + SCALE_SUFFIX, about)["data_offsets"]
            sizes = {"offset": header_bytes + begin, "size_bytes": end - begin, "num_tokens": about["shape"][0]}
            entries[name] = {**sizes, "grid_thw": grids[name], "xxh3_64": 16 * "0"}
    return entries


def is_confirmed(receipt: Receipt, broken: bytes) -> bool:
    """Whether the broken receipt has all checksums of the rebuilt one, each with at most one wrong digit.

    Then only the receipt is damaged: the checksum of a changed image would differ in about 15 of 16 digits.
    """
    return all(_is_nearly_in(region.xxh3_64.encode(), broken) for region in regions(receipt))


def _is_nearly_in(digits: bytes, content: bytes) -> bool:
    if digits in content:
        return True
    return any(re.search(digits[:at] + b"." + digits[at + 1 :], content, re.DOTALL) for at in range(len(digits)))


def rebuild_plan(folder: Path, file_of: Mapping[str, Path]) -> list[Path]:
    """Write broken and lost plan files again from the receipts; returns their paths. No worker may be alive.

    Plan files keep their numbers, and shards theirs; the first of several lost files gets the shards of all. Shards
    without a receipt get no images; the next build that wants these plans them again. `file_of` maps image keys to
    files, as far as they are known.
    """
    numbers = [shard_number(path.stem.replace("plan", "shard")) for path in folder.glob("plan-?????.json")]
    planned: set[int] = set()
    lost = []
    for path in (plan_path(folder, number) for number in range(max(numbers, default=0) + 2)):
        try:
            planned |= {shard_number(shard.name) for shard in read_plan_file(path)[0]}
        except (FileNotFoundError, CacheCorrupt):
            lost.append(path)
    known = {*finished_shards(folder), *(path.stem for path in (folder / SHARDS).glob("*.safetensors"))}
    numbers = [*map(shard_number, known), *planned]
    names = [shard_name(number) for number in range(max(numbers, default=-1) + 1) if number not in planned]
    shards = [_planned(folder, name, file_of) for name in names]
    rebuilt = lost[: max(len(lost) - 1, bool(shards))]  # the last one only follows the others
    for path in rebuilt:
        write_text(path, plan_text(shards))
        shards = []
    return rebuilt


def _planned(folder: Path, name: str, file_of: Mapping[str, Path]) -> Shard:
    """A shard of the plan, from its receipt."""
    try:
        receipt = read_receipt(folder, name)
    except (FileNotFoundError, CacheCorrupt):
        return Shard(name, ())
    tokens_of = {key: entry.num_tokens for key, entry in receipt.images.items()} | dict.fromkeys(receipt.failed, 0)
    files = {key: (str(file_of[key]),) for key in tokens_of if key in file_of}
    return Shard(name, tuple(PlannedImage(key, number, files.get(key, ())) for key, number in tokens_of.items()))


def images_of_shard(folder: Path, planned: Shard) -> set[str] | None:
    """The images of a shard by its receipt, or else all that it may have by plan or header; None if unknown."""
    with contextlib.suppress(CacheCorrupt, OSError):
        return set(read_receipt(folder, planned.name).images)
    if planned.images:
        return set(planned.keys)
    with contextlib.suppress(ValueError):
        tensors, _, _ = shard_header(shard_path(folder, planned.name))
        return {name.partition(".")[0] for name in tensors}
    return None


def find_files(keys: set[str], planned: Shard, images: ImageIndex) -> ImageFiles:
    """Files that still have the bytes of these images: those of the run first, then those of the plan."""
    found: ImageFiles = {}
    of_run = {images.path_of[key] for key in keys if key in images.path_of}
    of_plan = {Path(file) for image in planned.images for file in image.files}
    for paths in (of_run, of_plan - of_run):
        if keys <= found.keys():
            break
        for path, data in read_many(sorted(paths)):
            if not isinstance(data, ImageError) and (key := bytes_key(data)) in keys:
                found.setdefault(key, (path, image_size(data)))
    return found


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
        if check_plan(folder, finished_shards(folder))[1]:
            check_owned()
            file_of = {key: path for path, key in images.key_of.items()}
            work.report.mended += [path.name for path in rebuild_plan(folder, file_of)]
        work.remove(found.damaged)
        check_owned()
        with contextlib.suppress(CacheCorrupt):  # a receipt stays broken
            write_index(folder, fingerprint.sha256)
        again = work.to_encode
        return work.report, ImageIndex(
            key_of={path: key for key, (path, _) in again.items()},
            path_of={key: path for key, (path, _) in again.items()},
            size_of={key: size for key, (_, size) in again.items()},
            unusable=images.unusable,
        )


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
        self.to_encode: ImageFiles = {}
        """The images of removed shards that were found again."""

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
        with contextlib.suppress(CacheCorrupt, OSError):
            return rebuild_receipt(self._folder, name, self._fingerprint)
        return None

    def remove(self, shards: Iterable[str]) -> None:
        """Remove those of these shards that are still damaged and whose images were found again."""
        damaged = [name for name in shards if f"{name}.json" not in self.report.mended]
        plan = check_plan(self._folder, ())[0] if damaged else None
        planned = {shard.name: shard for shard in plan.shards} if plan else {}
        for name in damaged:  # it may have been restored since it was verified
            if verify_shard(self._folder, name, self._fingerprint, self.report.level)[1]:
                self._remove(planned.get(name, Shard(name, ())), set(damaged))

    def _remove(self, shard: Shard, damaged: set[str]) -> None:
        needed = images_of_shard(self._folder, shard)
        found = find_files({*(needed or ()), *shard.keys}, shard, self._images)
        lost = set(needed or ()) - found.keys()
        for name in finished_shards(self._folder) if lost else ():  # other shards may have these images
            if name not in damaged:
                with contextlib.suppress(CacheCorrupt, FileNotFoundError):
                    lost -= read_receipt(self._folder, name).images.keys()
        if not self._drop and needed is None:
            self.report.left[shard.name] = "which images it holds is unknown; --drop removes it"
        elif not self._drop and lost:
            of = f"of its {count(len(needed or ()), 'image')}"
            self.report.left[shard.name] = (
                f"the files of {len(lost):,} {of} were not found: {listed(sorted(lost))}; restore them, or remove the "
                "shard and lose these images with --drop"
            )
        else:
            self._check_owned()
            self._remove_index()
            shard_path(self._folder, shard.name).unlink(missing_ok=True)
            receipt_path(self._folder, shard.name).unlink(missing_ok=True)
            self.to_encode |= found
            self.report.num_again = len(self.to_encode)
            self.report.lost += sorted(lost)
            self.report.removed.append(shard.name)

    def _remove_index(self) -> None:
        for name in (INDEX, INDEX_CHECKSUM):
            (self._folder / name).unlink(missing_ok=True)
