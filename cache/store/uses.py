"""Which runs read a cache: a note for each in the cache folder, so that garbage collection keeps what a run needs.

Design: training writes the note when it opens the cache. The note counts while the run folder exists and is not empty;
deleting or moving that folder ends the use. So a killed run has nothing to clean up. A run folder noted by another
machine may be on that machine's own disk; if it is not visible here, the note counts for 30 days.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lookonce.files import read_json, write_json

USES = "uses"
UNSEEN_S = 30 * 24 * 3600
"""How long a note counts if its run folder is not visible and another machine wrote it."""


@dataclass(frozen=True)
class Use:
    """A run that has opened a cache."""

    run: str
    """The absolute path of the run folder."""
    host: str
    time: float
    """When the run last opened the cache, in seconds since 1970."""


def note_use(folder: Path, run_folder: Path) -> None:
    """Note in a cache folder that a run reads it; does nothing if the folder is read-only."""
    use = Use(str(run_folder.absolute()), socket.gethostname(), round(time.time(), 3))
    with contextlib.suppress(OSError):
        write_json(use_path(folder, run_folder), asdict(use))


def use_path(folder: Path, run_folder: Path) -> Path:
    return folder / USES / f"{hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:16]}.json"


def uses(folder: Path) -> list[Use]:
    """The uses of a cache whose run folder still exists, sorted by that folder."""
    found = []
    for path in (folder / USES).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # removed or broken: not a use
            use = Use(**read_json(path))
            if _is_in_use(use):
                found.append(use)
    return sorted(found, key=lambda use: use.run)


def _is_in_use(use: Use) -> bool:
    try:
        return any(Path(use.run).iterdir())
    except FileNotFoundError:
        return use.host != socket.gethostname() and time.time() - use.time < UNSEEN_S
