"""Which trainings read a cache: a note each in the cache's folder, so that nobody deletes what a run goes on from.

Design: a note is written when a training opens the cache, and counts for as long as the run's folder is there with
something in it. Nothing needs to be taken back, so a killed run leaves no lie; deleting or moving the run ends its use.
A run folder that was noted by another machine may be on that machine's own disk: where it can not be seen, the note
counts for 30 days.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lookonce.files import write_json

USES = "uses"
UNSEEN_S = 30 * 24 * 3600


@dataclass(frozen=True)
class Use:
    """A training that has opened a cache."""

    run: str
    """Its folder, absolute."""
    host: str
    time: float
    """When it last did, seconds since 1970."""


def note_use(folder: Path, run_folder: Path) -> None:
    """Leave a note in a cache folder that a run reads it; does nothing where it may not write."""
    use = Use(str(run_folder.absolute()), socket.gethostname(), round(time.time(), 3))
    with contextlib.suppress(OSError):
        write_json(use_path(folder, run_folder), asdict(use))


def use_path(folder: Path, run_folder: Path) -> Path:
    return folder / USES / f"{hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()[:16]}.json"


def uses(folder: Path) -> list[Use]:
    """The runs that use a cache, those whose folder is still there, by their folder's name."""
    found = []
    for path in (folder / USES).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # removed or broken: no use
            use = Use(**json.loads(path.read_text()))
            if _is_in_use(use):
                found.append(use)
    return sorted(found, key=lambda use: use.run)


def _is_in_use(use: Use) -> bool:
    try:
        return any(Path(use.run).iterdir())
    except FileNotFoundError:
        return use.host != socket.gethostname() and time.time() - use.time < UNSEEN_S
