"""What killed processes leave in a cache folder, and which of it may be removed.

- A temporary file: its process has ended on this machine, or it was not written to for longer than a claim lasts.
- A claim: its worker is dead.
- A shard without a receipt: no living worker has claimed it.
- The scratch folder of a measurement, beside the caches: its process has ended, or wrote nothing for an hour.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from lookonce.cache.store.claims import CLAIMS, claimed_work
from lookonce.cache.store.receipts import finished_shards
from lookonce.cache.store.shards import SHARDS
from lookonce.claim_file import EXPIRY_S, age, is_dead, remove_if_dead
from lookonce.files import SCRATCH, TEMPORARY_MARK, writer_host

SCRATCH_EXPIRY_S = 3600
"""Long enough for a measurement to load its models between two writes."""
SCRATCH_NAME = re.compile(rf"{SCRATCH}[a-z]+{re.escape(TEMPORARY_MARK)}(.+-\d+-[a-z0-9_]{{8}})")


def temporary_files(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[Path]:
    """Temporary files whose writer has ended."""
    claimed = {work.shard for work, _, alive in claimed_work(folder, expiry_s) if alive}
    for path in sorted(folder.rglob(f"*{TEMPORARY_MARK}*")):
        name, _, writer = path.name.partition(TEMPORARY_MARK)
        if path.is_dir() or (path.parent.name == SHARDS and name.split(".")[0] in claimed):
            continue
        with contextlib.suppress(FileNotFoundError):
            if _has_ended(writer) or age(path) > expiry_s:
                yield path


def dead_claims(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[Path]:
    """The files of dead claims."""
    for path in sorted((folder / CLAIMS).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            if is_dead(path, expiry_s):
                yield path


def unfinished_shards(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[Path]:
    """Shard files without a receipt that no living worker has claimed."""
    known = set(finished_shards(folder)) | {work.shard for work, _, alive in claimed_work(folder, expiry_s) if alive}
    return (path for path in sorted((folder / SHARDS).glob("*.safetensors")) if path.stem not in known)


def scratch_folders(root: Path) -> Iterator[Path]:
    """Scratch folders below a folder of caches whose process has ended or wrote nothing for `SCRATCH_EXPIRY_S`."""
    for path in sorted(root.glob(f"{SCRATCH}*")):
        name = SCRATCH_NAME.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                if _has_ended(name[1]) or _idle_s(path) > SCRATCH_EXPIRY_S:
                    yield path


def _idle_s(folder: Path) -> float:
    """Seconds since anything in a folder was modified."""
    written = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return age(folder) - (written - folder.stat().st_mtime)


def sweep(folder: Path, expiry_s: float = EXPIRY_S) -> None:
    """Remove the temporary files and claims of dead workers."""
    for path in temporary_files(folder, expiry_s):
        path.unlink(missing_ok=True)
    for path in dead_claims(folder, expiry_s):
        remove_if_dead(path, expiry_s)


def _has_ended(writer: str) -> bool:
    """Whether the process in a temporary name (HOST-PID-RANDOM) ran on this machine and has ended."""
    host, _, rest = writer.rpartition("-")[0].rpartition("-")
    return host == writer_host() and rest.isdigit() and not psutil.pid_exists(int(rest))
