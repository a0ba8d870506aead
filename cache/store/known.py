"""Fingerprints that were found before, for who only looks: status, verify, stage.

Design: finding one takes the whole tower (1.2 GB for 8B) and torch and transformers in memory (6 s of a CPU, more from
a network filesystem). A model whose files all have the sizes and times of writing that they had then, opened with the
same settings and the same libraries, has the fingerprint that it had then. As with images' stamps, a file that was
written just before is not trusted. Who makes features or trains on them reads the tower all the same. One small file a
model and settings, beside the caches; anyone may delete it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lookonce.cache.model.hub import FILES
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.datasets.stamps import stamp
from lookonce.environment import library_versions
from lookonce.files import write_json

KNOWN = "fingerprints"
NUM_DIGITS = 16


@dataclass(frozen=True)
class Source:
    """What a fingerprint is found from, as it was before it was read."""

    folder: Path
    """Of the model."""
    settings: dict[str, Any]
    stamps: dict[str, list[int] | None]
    """Of each file of the model, by its name."""
    libraries: dict[str, str | None]

    @classmethod
    def of(cls, folder: Path, settings: dict[str, Any]) -> Source:
        """`settings` are all of the run file that a fingerprint depends on, besides the model."""
        files = sorted({path for pattern in FILES for path in folder.glob(pattern)})
        found = {path.name: stamp(path) for path in files}
        stamps = {name: list(value) if value else None for name, value in found.items()}
        return cls(folder, settings, stamps, library_versions())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": self._real_folder}

    def remember(self, root: Path, fingerprint: Fingerprint) -> None:
        """Note the fingerprint that was found, in a folder of caches."""
        if all(self.stamps.values()):
            with contextlib.suppress(OSError):  # of one that may only be looked at
                write_json(self._path(root), {"source": self.to_json(), "fingerprint": fingerprint.to_json()})

    def recall(self, root: Path) -> Fingerprint | None:
        """The fingerprint that was found from just this; None if none was."""
        try:
            value = json.loads(self._path(root).read_text())
            if value["source"] == self.to_json() and all(self.stamps.values()):
                return Fingerprint.from_json(value["fingerprint"])
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
