"""Free space on the disk: checked before a build and before each shard, and reported when a disk is full."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lookonce.errors import DiskFull, LookonceError
from lookonce.errors import existing as existing
from lookonce.files import is_full
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


def with_margin(num_bytes: int) -> int:
    return num_bytes + max(int(num_bytes * MARGIN), MIN_MARGIN_BYTES)


def check_room(folder: Path, num_bytes: int, content: str = "", advice: str = CACHE_ADVICE) -> None:
    """Raise DiskFull if `num_bytes` more do not fit with a margin; the message has `content` and `advice`."""
    if num_bytes and free_bytes(folder) < with_margin(num_bytes):
        raise disk_full(folder, num_bytes, content=content, advice=advice)


def disk_full(
    folder: Path, num_bytes: int, error: OSError | None = None, content: str = "", advice: str = CACHE_ADVICE
) -> DiskFull:
    """The error for `num_bytes` more that do not fit; `error` is the system's, if it refused to write."""
    needed, free = with_margin(num_bytes), free_bytes(folder)
    missing = f"{size(free)} are free, {size(needed - free)} ({needed - free:,} bytes) are missing"
    if free >= needed:
        missing = (
            f"{size(free)} are free but were refused ({error and error.strerror}; `quota -s` and `ulimit -f` say why)"
        )
    content = content or f"the rest of {folder}"
    return DiskFull(f"no room for {content}: {size(needed)} are needed with a margin, {missing}. {advice}")


@contextlib.contextmanager
def full_disk_named(folder: Path, num_bytes: int, content: str, advice: Callable[[], str]) -> Iterator[None]:
    """Within the block, a full disk is an error that says how many bytes are missing for `content`, and the `advice`.

    Libraries raise their own errors: torch.save a RuntimeError, safetensors a SafetensorError, without the system's
    reason. So after any error but ours, the disk is asked whether it takes `num_bytes` in `folder`.

    Raises:
        DiskFull: there is no room.
    """
    try:
        yield
    except LookonceError:
        raise
    except Exception as error:
        refused = error if isinstance(error, OSError) and is_full(error) else _refusal(folder, num_bytes)
        if refused is None:
            raise
        raise disk_full(folder, num_bytes, refused, content, advice()) from error


def _refusal(folder: Path, num_bytes: int) -> OSError | None:
    """The system's error if a folder has no room for a file of `num_bytes`; None if it has. Writes nothing."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        return error if is_full(error) else None
    return None
