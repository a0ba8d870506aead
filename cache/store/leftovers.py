"""What killed processes leave in a cache folder, and which of it may go.

A file under a temporary name may go when its process is gone from this machine or it has not been written to for
longer than a claim lasts; a claim when its worker is dead; a shard without a receipt when nobody has it in work. The
scratch folder of a measurement, beside the caches, may go when its process is gone, or silent for an hour.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from lookonce.cache.store.claims import CLAIMS, EXPIRY_S, age, bury, works
from lookonce.cache.store.receipts import finished_shards
from lookonce.cache.store.shards import SHARDS
from lookonce.files import SCRATCH, TEMPORARY_MARK, writer_host

SCRATCH_EXPIRY_S = 3600
"""A measurement loads its models between two writes."""
SCRATCH_NAME = re.compile(rf"{SCRATCH}[a-z]+{re.escape(TEMPORARY_MARK)}(.+-\d+-[a-z0-9_]{{8}})")


def temporaries(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[Path]:
    """Temporary files whose writer is gone."""
    in_work = {work.shard for work, _, alive in works(folder, expiry_s) if alive}
    for path in sorted(folder.rglob(f"*{TEMPORARY_MARK}*")):
        name, _, writer = path.name.partition(TEMPORARY_MARK)
        if path.is_dir() or (path.parent.name == SHARDS and name.split(".")[0] in in_work):
            continue
        with contextlib.suppress(FileNotFoundError):
            if _is_gone(writer) or age(path) > expiry_s:
                yield path


def dead_claims(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[Path]:
    """Claims whose worker is dead."""
    return (folder / CLAIMS / f"{work.shard}.json" for work, _, alive in works(folder, expiry_s) if not alive)


def unfinished_shards(folder: Path, expiry_s: float = EXPIRY_S) -> Iterator[Path]:
    """Shard files without a receipt that nobody has in work."""
    known = set(finished_shards(folder)) | {work.shard for work, _, alive in works(folder, expiry_s) if alive}
    return (path for path in sorted((folder / SHARDS).glob("*.safetensors")) if path.stem not in known)


def scratch_folders(root: Path) -> Iterator[Path]:
    """Scratch folders in a folder of caches whose process is gone, or has written nothing for long."""
    for path in sorted(root.glob(f"{SCRATCH}*")):
        name = SCRATCH_NAME.fullmatch(path.name)
        if name and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                if _is_gone(name[1]) or _silent_s(path) > SCRATCH_EXPIRY_S:
                    yield path


def _silent_s(folder: Path) -> float:
    """Seconds since anything in a folder was written."""
    written = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    return age(folder) - (written - folder.stat().st_mtime)


def sweep(folder: Path, expiry_s: float = EXPIRY_S) -> None:
    """Remove what can only be rubbish: temporary files and claims of the dead."""
    for path in temporaries(folder, expiry_s):
        path.unlink(missing_ok=True)
    for path in dead_claims(folder, expiry_s):
        bury(path, expiry_s)


def _is_gone(writer: str) -> bool:
    """Whether the process in a temporary file's name, HOST-PID-RANDOM, was on this machine and is not any more."""
    host, _, rest = writer.rpartition("-")[0].rpartition("-")
    return host == writer_host() and rest.isdigit() and not psutil.pid_exists(int(rest))
