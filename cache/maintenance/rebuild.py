"""What damage has left, put together again: receipts from their shards, a plan from receipts.

Design: shards describe themselves (names, shapes, places and grids stand in their header), so a receipt that is lost or
broken can be written anew. What only the receipt knew is gone: which images failed (they are tried again), norms and
peaks, and how long it took. Checksums are then those of the file as it is now, so whether its bytes are still those
that were written must be known from elsewhere: `is_confirmed` finds the new checksums in what is left of the old
receipt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lookonce.cache.maintenance.checks import Region, agreement, checksum, parse_header, regions, tiling
from lookonce.cache.store.dtypes import SCALE_SUFFIX
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.manifest import BROKEN, plan_path, plan_text, read_plan_part
from lookonce.cache.store.plan import PlannedImage, Shard, shard_name
from lookonce.cache.store.receipts import Entry, Receipt, finished_shards, read_receipt
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.errors import CacheCorrupt
from lookonce.files import create_text, write_text

KEY = re.compile(r"[0-9a-f]{64}")


def receipt_of_shard(folder: Path, name: str, fingerprint: Fingerprint) -> Receipt:
    """A receipt made from the shard alone, with the checksums of its bytes as they are.

    Raises:
        CacheCorrupt: the file is no whole shard of this cache.
        OSError: there is none, or the disk does not give it.
    """
    path = shard_path(folder, name)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        stat = os.fstat(descriptor)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        content = os.pread(descriptor, min(8 + length, stat.st_size), 0)
        try:
            found, metadata, header_bytes = parse_header(content)
            images = _entries(found, metadata, header_bytes)
        except BROKEN as error:
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
        problems = [*tiling(receipt), *agreement(content, receipt, fingerprint)]
        if problems:
            raise CacheCorrupt(f"{path} is no whole shard of this cache ({problems[0].what})")
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
            raise ValueError(f"{name!r} is no image key")
        begin, _ = about["data_offsets"]
        _, end = found.get(name + SCALE_SUFFIX, about)["data_offsets"]
        grid_t, grid_h, grid_w = metadata["grid_thw"][name]
        entries[name] = Entry(header_bytes + begin, end - begin, about["shape"][0], (grid_t, grid_h, grid_w), "")
    return entries


def is_confirmed(receipt: Receipt, broken: bytes) -> bool:
    """Whether all checksums of a receipt made from a shard stand in the broken one, each with one wrong digit at most.

    Then the damage is in the receipt alone: that of a changed image would have some 15 wrong digits of 16.
    """
    return all(_stands_in(region.xxh3_64.encode(), broken) for region in regions(receipt))


def _stands_in(digits: bytes, content: bytes) -> bool:
    if digits in content:
        return True
    return any(re.search(digits[:at] + b"." + digits[at + 1 :], content, re.DOTALL) for at in range(len(digits)))


def mend_plan(folder: Path, file_of: Mapping[str, Path]) -> list[Path]:
    """Write broken and lost parts of the plan anew from the receipts; gives their paths. No worker may be alive.

    A part keeps its place and its shards their numbers. Those that had no receipt come back without images: whoever
    wants these plans them again. `file_of` has the file of each image key, as far as known.
    """
    parts = list(_parts(folder))
    mended, first = [], 0
    for number, (path, shards) in enumerate(parts):
        if shards:
            first = shard_number(shards[-1].name) + 1
        elif shards is None:
            after = [later[0].name for _, later in parts[number + 1 :] if later]
            last = shard_number(after[0]) if after else max(map(shard_number, _names(folder)), default=-1) + 1
            if first < last or after or path.exists():
                text = plan_text(_shard(folder, shard_name(place), file_of) for place in range(first, last))
                write_text(path, text) if path.exists() else create_text(path, text)
                mended.append(path)
            first = max(first, last)
    return mended


def _parts(folder: Path) -> Iterator[tuple[Path, tuple[Shard, ...] | None]]:
    """The parts of the plan, and the place of one more; None where one is broken or lost."""
    there = (re.fullmatch(r"plan-(\d{5})", path.stem) for path in folder.glob("plan-*.json"))
    for number in range(max((int(found[1]) for found in there if found), default=0) + 2):
        path = plan_path(folder, number)
        try:
            yield path, read_plan_part(path)
        except (FileNotFoundError, CacheCorrupt, *BROKEN):
            yield path, None


def _shard(folder: Path, name: str, file_of: Mapping[str, Path]) -> Shard:
    """A shard of the plan as its receipt tells it."""
    try:
        receipt = read_receipt(folder, name)
    except (FileNotFoundError, CacheCorrupt):
        return Shard(name, ())
    tokens_of = {key: entry.num_tokens for key, entry in receipt.images.items()} | dict.fromkeys(receipt.failed, 0)
    files = {key: (str(file_of[key]),) for key in tokens_of if key in file_of}
    return Shard(name, tuple(PlannedImage(key, number, files.get(key, ())) for key, number in tokens_of.items()))


def _names(folder: Path) -> set[str]:
    """All shards that left a trace."""
    return {*finished_shards(folder), *(path.stem for path in (folder / SHARDS).glob("*.safetensors"))}


def shard_number(name: str) -> int:
    """Of a shard; -1 if the name is none of a shard's."""
    digits = name.removeprefix("shard-")
    return int(digits) if digits.isdecimal() else -1
