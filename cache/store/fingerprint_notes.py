"""Fingerprints that were found before, for who only looks: status, verify, stage.

Design: finding one takes the whole tower (1.2 GB for 8B) and torch and transformers in memory (6 s of a CPU, more from
a network filesystem). A model whose files all have the sizes and times that they had then, opened with the same
settings, the same libraries and the same code, has the fingerprint that it had then. The code is known by its content:
a version or a number would have to be raised by hand. Of times there is that of the last change too (ctime), which
nobody can set; a chmod costs finding the fingerprint once more. As with images' stamps, a file that was written just
before is not trusted. Who makes features or trains on them reads the tower all the same. One small file a model and
settings, beside the caches; anyone may delete it. Recalling it costs 5 ms.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time as now
from typing import Any

from lookonce.cache.constants import FORMAT_VERSION
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.datasets.stamps import TICK_S
from lookonce.environment import library_versions
from lookonce.files import write_json
from lookonce.hub import FILES

KNOWN = "fingerprints"
NUM_DIGITS = 16


@dataclass(frozen=True)
class Source:
    """What a fingerprint is found from, as it was before it was read."""

    folder: Path
    """Of the model."""
    settings: dict[str, Any]
    stamps: dict[str, list[int] | None]
    """Of each file of the model, by its name: bytes, and nanoseconds of writing and of change; None if just written."""
    libraries: dict[str, str | None]
    code: str
    """The sha256 of the modules that find fingerprints."""

    @classmethod
    def of(cls, folder: Path, settings: dict[str, Any]) -> Source:
        """`settings` are all of the run file that a fingerprint depends on, besides the model."""
        files = sorted({path for pattern in FILES for path in folder.glob(pattern)})
        stamps = {path.name: _stamp(path) for path in files}
        code = hashlib.sha256(b"".join(path.read_bytes() for path in code_files()))
        return cls(folder, settings, stamps, library_versions(), code.hexdigest())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": self._real_folder}

    def remember(self, root: Path, fingerprint: Fingerprint) -> None:
        """Note the fingerprint that was found in a folder of caches, if there is one and the note is not there yet."""
        note = {"source": self.to_json(), "fingerprint": fingerprint.to_json(), "sha256": fingerprint.sha256}
        with contextlib.suppress(OSError):  # of one that may only be looked at, or not even that
            if root.is_dir() and all(self.stamps.values()) and self.recall(root) != fingerprint:
                write_json(self._path(root), note)

    def recall(self, root: Path) -> Fingerprint | None:
        """The fingerprint that was found from just this; None if none was."""
        try:
            value = json.loads(self._path(root).read_text())
            if value["source"] == self.to_json() and all(self.stamps.values()):
                found = Fingerprint.from_json(value["fingerprint"])
                is_whole = found.sha256 == value["sha256"] and found.format_version == FORMAT_VERSION
                return found if is_whole else None
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    @property
    def _real_folder(self) -> str:
        """The same for all names of a model; asked anew, so that a link that was moved since fits no stamps."""
        return str(self.folder.resolve())

    def _path(self, root: Path) -> Path:
        name = hashlib.sha256(json.dumps([self._real_folder, self.settings], sort_keys=True).encode()).hexdigest()
        return root / KNOWN / f"{name[:NUM_DIGITS]}.json"


def code_files() -> list[Path]:
    """The modules that find fingerprints: a change to any of them may change what is found."""
    cache = Path(__file__).parents[1]
    store = [cache / "store" / f"{name}.py" for name in ("fingerprint", "dtypes")]
    return [cache / "constants.py", *store, *sorted((cache / "model").glob("*.py"))]


def _stamp(path: Path) -> list[int] | None:
    with contextlib.suppress(OSError):
        found = path.stat()
        if max(found.st_mtime, found.st_ctime) < now() - TICK_S:
            return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    return None
