"""Repair a damaged cache: remove what is damaged, so that the next build writes it again.

Design: one rule serves all damage. A broken manifest is written again from the run's fingerprint; a broken plan file is
removed with those after it, and a damaged shard with its receipt. The build that follows plans and encodes what is
missing. A shard is removed only after each of its images was found again, with the right bytes, in the files of the run
or in those that the plan names, or in other shards. A repair owns the cache: it is refused while another process uses
it. The receipt is removed last, so an interrupted repair leaves a receipt without its shard, which the next one finds.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookonce.cache.format import BUILD_COMMAND, read_header
from lookonce.cache.maintenance.verify import Level, check_manifest, verify
from lookonce.cache.store.claims import owning
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    MANIFEST,
    PLAN,
    Plan,
    Shard,
    ensure_manifest,
    finished_shards,
    plan_files,
    read_plan_file,
    read_receipt,
    receipt_path,
)
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.claim_file import EXPIRY_S
from lookonce.datasets.augment import Variant
from lookonce.datasets.images import ImageIndex, Size, bytes_key, image_size, read_many
from lookonce.errors import CacheCorrupt, CacheError, ImageError
from lookonce.text import count, listed

ImageFiles = dict[str, tuple[Path, Size | None]]
"""A file and the image size for each image key."""


@dataclass
class RepairReport:
    """What was damaged, and what was done about it."""

    folder: Path
    level: Level
    num_problems: int = 0
    rewritten: list[str] = field(default_factory=list)
    """The manifest, and plan files that the next build writes again."""
    removed: list[str] = field(default_factory=list)
    num_again: int = 0
    lost: list[str] = field(default_factory=list)
    """Images of removed shards that were not found again."""
    left: dict[str, str] = field(default_factory=dict)
    """Shards that stay damaged, and why."""

    def text(self) -> str:
        problems = f"{count(self.num_problems, 'problem')} found" if self.num_problems else "nothing to repair"
        lines = [f"cache {self.folder}: {problems}"]
        if self.rewritten:
            lines.append(f"  written again: {listed(self.rewritten)}")
        if self.removed:
            again = f"{count(self.num_again, 'image')} to encode again"
            lines.append(f"  removed {count(len(self.removed), 'damaged shard')} ({listed(self.removed)}): {again}")
        if self.lost:
            lines.append(f"  lost {count(len(self.lost), 'image')}, whose files were not found: {listed(self.lost)}")
        lines += [f"  did not repair {name}: {reason}" for name, reason in self.left.items()]
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
    """Remove the damage in the cache of a run; also returns the images to build: the run's, and others of its shards.

    `images` are the run's. `level` says how to look for damage. `drop` removes damaged shards even if some of their
    images are not found again. `provenance` is for a manifest that must be written again.

    Raises:
        CacheError: the folder has no shards, or another process uses it.
        CacheMismatch: the folder holds another cache.
    """
    if not (folder / SHARDS).exists():
        raise CacheError(f"{folder} holds no shards to repair; make them with: {BUILD_COMMAND}")
    report = RepairReport(folder, level)
    to_encode: ImageFiles = {}
    with owning(folder, "lookonce cache repair", expiry_s) as check_owned:
        manifest = folder / MANIFEST
        if not manifest.exists() or check_manifest(folder)[1]:
            manifest.unlink(missing_ok=True)
            report.num_problems += 1
            report.rewritten.append(MANIFEST)
        ensure_manifest(folder, fingerprint, provenance or {})
        verification = verify(folder, level)
        report.num_problems += len(verification.problems)
        plan, broken = remove_broken_plan(folder)
        is_lost = any(problem.part == "plan" for problem in verification.problems) and not broken
        report.rewritten += [PLAN] if is_lost else broken
        planned = {shard.name: shard for shard in plan.shards}
        intact = [name for name in finished_shards(folder) if name not in verification.damaged]
        for name in verification.damaged:
            shard = planned.get(name, Shard(name, ()))
            needed = images_of_shard(folder, shard)
            files = find_files({*(needed or ()), *shard.keys}, plan, images)
            lost = set(needed or ()) - files.keys()
            for intact_name in intact if lost else ():
                lost -= read_receipt(folder, intact_name).images.keys()
            if not drop and (reason := reason_to_keep(needed, lost)):
                report.left[name] = reason
                continue
            check_owned()
            shard_path(folder, name).unlink(missing_ok=True)
            receipt_path(folder, name).unlink(missing_ok=True)
            report.removed.append(name)
            report.lost += sorted(lost)
            to_encode |= files
    report.num_again = len(to_encode)
    return report, with_files(images, to_encode, plan.variants)


def remove_broken_plan(folder: Path) -> tuple[Plan, list[str]]:
    """Remove the first broken plan file and all after it; returns the intact plan and the names of those files."""
    plan, files = Plan(), plan_files(folder)
    with contextlib.suppress(CacheCorrupt):
        for path in files:
            plan = plan.extended(*read_plan_file(path))
    broken = files[plan.num_files :]
    for path in reversed(broken):  # the last first, so that an interruption leaves no gap
        path.unlink()
    return plan, [path.name for path in broken]


def images_of_shard(folder: Path, planned: Shard) -> set[str] | None:
    """The images of a shard by its receipt, or all that it may have by the plan, or by its header; None if unknown."""
    with contextlib.suppress(CacheCorrupt, OSError):
        return set(read_receipt(folder, planned.name).images)
    if planned.images:
        return set(planned.keys)
    with contextlib.suppress(ValueError, OSError):
        header, _ = read_header(shard_path(folder, planned.name))
        return {name.partition(".")[0] for name in header} - {"__metadata__"}
    return None


def find_files(keys: set[str], plan: Plan, images: ImageIndex) -> ImageFiles:
    """Files that still have the bytes of these images: those of the run first, then those of the plan.

    The file of a variant is that of its image.
    """
    file_of: ImageFiles = {}
    variants = images.variants | plan.variants
    made_from: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        made_from[variants[key].of if key in variants else key].append(key)
    of_run = {images.path_of[key] for key in made_from if key in images.path_of}
    of_plan = {Path(file) for image in plan.images if image.key in made_from for file in image.files}
    for paths in (of_run, of_plan - of_run):
        if keys <= file_of.keys():
            break
        for path, data in read_many(sorted(paths)):
            if not isinstance(data, ImageError):
                for key in made_from.get(bytes_key(data), ()):
                    file_of.setdefault(key, (path, image_size(data)))
    return file_of


def reason_to_keep(needed: set[str] | None, lost: set[str]) -> str:
    """Why a damaged shard with the images `needed` is not removed; empty if it can be."""
    if needed is None:
        return "which images it holds is unknown; remove it with --drop"
    if lost:
        return (
            f"the files of {len(lost):,} of its {count(len(needed), 'image')} were not found: {listed(sorted(lost))}; "
            "restore them, or remove the shard and lose these images with --drop"
        )
    return ""


def with_files(images: ImageIndex, file_of: ImageFiles, variants: Mapping[str, Variant]) -> ImageIndex:
    """The images of the run, and the other images of these files, some of which are variants."""
    added = {key: file for key, file in file_of.items() if key not in images.path_of}
    return replace(
        images,
        key_of=images.key_of | {path: key for key, (path, _) in added.items() if key not in variants},
        variants=images.variants | {key: variants[key] for key in added if key in variants},
        path_of=images.path_of | {key: path for key, (path, _) in added.items()},
        size_of=images.size_of | {key: size for key, (_, size) in added.items()},
    )
