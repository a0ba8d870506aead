"""Free space on the disk: checked before a build and before each shard, and reported when a disk is full."""

from __future__ import annotations

import shutil
from pathlib import Path

from lookonce.errors import DiskFull
from lookonce.text import size

MARGIN = 0.02
"""The share of what is still to be written that must stay free, for headers, receipts and other users' files."""
MIN_MARGIN_BYTES = 32_000_000
CACHE_ADVICE = (
    "Finished shards are kept: make room (`lookonce cache gc RUN.yaml` lists what can be deleted), choose another "
    "`cache.dir`, or halve the cache with `cache.dtype: fp8_e4m3`; then run the same command again"
)


def free_bytes(folder: Path) -> int:
    """The free bytes on the disk of a folder that need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    folder = folder.absolute()
    return folder if folder.exists() else existing(folder.parent)


def with_margin(num_bytes: int) -> int:
    return num_bytes + max(int(num_bytes * MARGIN), MIN_MARGIN_BYTES)


def check_room(folder: Path, num_bytes: int, what: str = "", advice: str = CACHE_ADVICE) -> None:
    """Check that `num_bytes` more fit on the disk of a folder, with a margin; `what` and `advice` go into the message.

    Raises:
        DiskFull: they do not fit; says how many bytes are missing.
    """
    if num_bytes and free_bytes(folder) < with_margin(num_bytes):
        raise disk_full(folder, num_bytes, what=what, advice=advice)


def disk_full(
    folder: Path, num_bytes: int, error: OSError | None = None, what: str = "", advice: str = CACHE_ADVICE
) -> DiskFull:
    """The error for `num_bytes` more that do not fit; `error` is the system's, if it refused to write."""
    needed, free = with_margin(num_bytes), free_bytes(folder)
    missing = f"{size(free)} are free, {size(needed - free)} ({needed - free:,} bytes) are missing"
    if free >= needed:
        missing = (
            f"{size(free)} are free but were refused ({error and error.strerror}; `quota -s` and `ulimit -f` say why)"
        )
    what = what or f"the rest of {folder}"
    return DiskFull(f"no room for {what}: {size(needed)} are needed with a margin, {missing}. {advice}")
