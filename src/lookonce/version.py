"""The version, in its own module, so that any module can import it without the package's public API; and the commit.

pip notes where it installed a package from (PEP 610). Of a repository it notes the commit; of an editable checkout git
is asked, which takes some milliseconds. A wheel has no commit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__version__ = "0.3.0"

NAME = "lookonce"
DIRTY = "-dirty"
"""The end of a commit that was not all of the code: tracked files had changes. `git describe` writes it so."""
DESCRIBE = ("git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--exclude=*", f"--dirty={DIRTY}")
TIMEOUT_S = 20


@functools.cache
def commit() -> str | None:
    """The git commit of the code that runs, with `-dirty` if there were changes; None if it is not known."""
    origin = _origin()
    if isinstance(info := origin.get("vcs_info"), dict):
        return info.get("commit_id")
    if isinstance(info := origin.get("dir_info"), dict) and info.get("editable"):
        return _commit_of(Path(unquote(urlsplit(str(origin.get("url"))).path)))
    return None


def _origin() -> dict[str, Any]:
    """What pip noted of where it installed this package from; empty if it noted nothing."""
    with contextlib.suppress(PackageNotFoundError, OSError, ValueError):
        value = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
        return value if isinstance(value, dict) else {}
    return {}


def _commit_of(checkout: Path) -> str | None:
    """The commit of a checkout; None if it is none, or this code is not in it."""
    if not (checkout / ".git").exists() or not Path(__file__).resolve().is_relative_to(checkout.resolve()):
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(DESCRIBE, cwd=checkout, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return done.stdout.strip() or None
    return None
