"""Room on the disk: asked before a build begins and before each shard, and named when it runs out."""

from __future__ import annotations

import shutil
from pathlib import Path

from lookonce.errors import DiskFull
from lookonce.text import size

MARGIN = 0.02
"""Of what is still to be written, to be left over: headers, receipts, other people's files."""
MIN_MARGIN_BYTES = 32_000_000


def free_bytes(folder: Path) -> int:
    """On the disk of a folder that need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The closest folder above that is there already, or the folder itself."""
    folder = folder.absolute()
    return folder if folder.exists() else existing(folder.parent)


def with_margin(num_bytes: int) -> int:
    return num_bytes + max(int(num_bytes * MARGIN), MIN_MARGIN_BYTES)


def check_room(folder: Path, num_bytes: int) -> None:
    """Make sure that `num_bytes` more can be written, with a margin.

    Raises:
        DiskFull: they can not; says how much is missing.
    """
    if num_bytes and free_bytes(folder) < with_margin(num_bytes):
        raise DiskFull(disk_full(folder, num_bytes))


def disk_full(folder: Path, num_bytes: int, error: OSError | None = None) -> str:
    """A message that names what is missing for `num_bytes` more; `error` is how the system put it."""
    needed, free = with_margin(num_bytes), free_bytes(folder)
    missing = f"{size(free)} are free, {size(needed - free)} ({needed - free:,} bytes) are missing"
    if free >= needed:
        missing = (
            f"{size(free)} are free and not given ({error and error.strerror}; `quota -s` and `ulimit -f` say why)"
        )
    return (
        f"no room for the rest of {folder}: it needs {size(needed)} with a margin, {missing}. What is finished is "
        "kept: make room (`lookonce cache gc RUN.yaml` lists what can go), choose another `cache.dir`, or halve it "
        "with `cache.dtype: fp8_e4m3`; then run the same command again"
    )
