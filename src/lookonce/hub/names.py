"""Names of repositories and revisions on the Hub, and what all downloads have. No function here asks the Hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from lookonce.errors import NoRoom, full_disk_code

CARD = "README.md"
FETCH_COMMAND = "lookonce fetch RUN.yaml"


@dataclass(frozen=True)
class Download:
    """Files of a repository on the Hub that are on this machine."""

    folder: Path
    commit: str
    license: str | None
    """The licence that the card names; None if it names none."""


def check_disk(error: Exception) -> None:
    """Raise NoRoom if a download failed because the disk of the folder of all downloads is full."""
    if (code := full_disk_code(error)) is not None:
        raise NoRoom(code, Path(constants.HF_HUB_CACHE)) from error


def is_hub_name(name: str) -> bool:
    """Whether it has the form of a repository's name on the Hub, owner/name."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))


def is_commit(revision: str | None) -> bool:
    """Whether a revision always means the same files; branches and tags may be moved."""
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision or ""))
