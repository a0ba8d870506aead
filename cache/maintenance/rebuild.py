"""Rebuild receipts from shards, and the plan from receipts.

Design: the header of a shard has the names, shapes, offsets and grids of its images, so a lost or broken receipt can be
written again. What only the receipt had is lost: which images failed (they are tried again), norms, peaks and times.
The new checksums are those of the file as it is now, which does not prove that its bytes are intact. `is_confirmed`
does: it finds the new checksums in what is left of the old receipt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lookonce.cache.constants import MAX_HEADER_BYTES, PARSE_ERRORS
from lookonce.cache.maintenance.checks import Region, check_header, check_offsets, checksum, parse_header, regions
from lookonce.cache.store.dtypes import SCALE_SUFFIX
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.manifest import plan_path, plan_text, read_plan_file
from lookonce.cache.store.plan import PlannedImage, Shard, shard_name
from lookonce.cache.store.receipts import Entry, Receipt, finished_shards, natural, read_receipt
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.errors import CacheCorrupt
from lookonce.files import create_text, write_text

KEY = re.compile(r"[0-9a-f]{64}")


def rebuild_receipt(folder: Path, name: str, fingerprint: Fingerprint) -> Receipt:
    """A receipt made from the shard alone, with the checksums of its current bytes.

    Raises:
        CacheCorrupt: the file is not a complete shard of this cache.
        OSError: it is missing or cannot be read.
    """
    path = shard_path(folder, name)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        stat = os.fstat(descriptor)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        content = os.pread(descriptor, min(8 + length, stat.st_size, MAX_HEADER_BYTES), 0)
        try:
            found, metadata, header_bytes = parse_header(content)
            images = _entries(found, metadata, header_bytes)
        except PARSE_ERRORS as error:
            raise CacheCorrupt(f"the header of {path} is broken ({error})") from None
        receipt = Receipt(
            shard=name,
            fingerprint=fingerprint.sha256,
            size_bytes=stat.st_size,
            header_bytes=header_bytes,
            header_xxh3_64=checksum(descriptor, Region("", 0, header_bytes, "")),
            host="",
            finished=round(stat.st_mtime, 3),
            seconds=0.0,
            images=images,
        )
        problems = [*check_offsets(receipt), *check_header(content, receipt, fingerprint)]
        if problems:
            raise CacheCorrupt(f"{path} is not a complete shard of this cache ({problems[0].what})")
        digest_of = {region.key: checksum(descriptor, region) for region in regions(receipt)}
    finally:
        os.close(descriptor)
    return replace(receipt, images={key: replace(entry, xxh3_64=digest_of[key]) for key, entry in images.items()})


def _entries(found: dict[str, Any], metadata: dict[str, Any], header_bytes: int) -> dict[str, Entry]:
    entries = {}
    for name, about in sorted(found.items()):
        if name.endswith(SCALE_SUFFIX):
            continue
        if not KEY.fullmatch(name):
            raise ValueError(f"{name!r} is not an image key")
        begin, _ = about["data_offsets"]
        _, end = found.get(name + SCALE_SUFFIX, about)["data_offsets"]
        grid_t, grid_h, grid_w = metadata["grid_thw"][name]
        entries[name] = Entry(
            natural(header_bytes + begin),
            natural(end - begin),
            natural(about["shape"][0]),
            (natural(grid_t), natural(grid_h), natural(grid_w)),
            "",
        )
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

    Plan files keep their numbers, and shards theirs. Shards without a receipt get no images; the next build that wants
    these plans them again. `file_of` maps image keys to files, as far as they are known.
    """
    plan_files = list(_plan_files(folder))
    rebuilt, first = [], 0
    for number, (path, shards) in enumerate(plan_files):
        if shards:
            first = shard_number(shards[-1].name) + 1
        elif shards is None:
            after = [later[0].name for _, later in plan_files[number + 1 :] if later]
            end = shard_number(after[0]) if after else max(map(shard_number, _known_names(folder)), default=-1) + 1
            if first < end or after or path.exists():
                names = map(shard_name, range(first, end))
                text = plan_text(_planned(folder, name, file_of) for name in names)
                write_text(path, text) if path.exists() else create_text(path, text)
                rebuilt.append(path)
            first = max(first, end)
    return rebuilt


def _plan_files(folder: Path) -> Iterator[tuple[Path, tuple[Shard, ...] | None]]:
    """The plan's files and the path of one more, with their shards; None for files that are broken or missing."""
    matches = (re.fullmatch(r"plan-(\d{5})", path.stem) for path in folder.glob("plan-*.json"))
    for number in range(max((int(match[1]) for match in matches if match), default=0) + 2):
        path = plan_path(folder, number)
        try:
            yield path, read_plan_file(path)[0]
        except (FileNotFoundError, CacheCorrupt, *PARSE_ERRORS):
            yield path, None


def _planned(folder: Path, name: str, file_of: Mapping[str, Path]) -> Shard:
    """A shard of the plan, from its receipt."""
    try:
        receipt = read_receipt(folder, name)
    except (FileNotFoundError, CacheCorrupt):
        return Shard(name, ())
    tokens_of = {key: entry.num_tokens for key, entry in receipt.images.items()} | dict.fromkeys(receipt.failed, 0)
    files = {key: (str(file_of[key]),) for key in tokens_of if key in file_of}
    return Shard(name, tuple(PlannedImage(key, number, files.get(key, ())) for key, number in tokens_of.items()))


def _known_names(folder: Path) -> set[str]:
    """Names of all shards that have a file or a receipt."""
    return {*finished_shards(folder), *(path.stem for path in (folder / SHARDS).glob("*.safetensors"))}


def shard_number(name: str) -> int:
    """The number in a shard's name; -1 if it is not the name of a shard."""
    digits = name.removeprefix("shard-")
    return int(digits) if digits.isdecimal() else -1
