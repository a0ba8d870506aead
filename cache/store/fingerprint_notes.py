"""Fingerprints and hashes of models, recorded with what they were computed from: for status, train and others.

Design: computing a fingerprint reads the whole tower (1.2 GB for 8B) and imports torch and transformers (6 s of CPU
time, more from a network filesystem). If all files of a model have the sizes and times of a recorded computation, and
settings, libraries and code are the same, the fingerprint is the same too. The code is identified by a checksum of its
files, because a version number would have to be raised by hand. Files of the model are compared by their stamps, as
images are (datasets/images.py). Builds compute the fingerprint from the tower all the same. There is one small file for
each model and settings, beside the caches; anyone may delete it. Reading it takes 5 ms.

The hash of the language model, by which a run recognises its own, is recorded in the same way: computing it reads all
weights (16 GB for 8B), once for each training of a study.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lookonce.families
from lookonce.cache.constants import FORMAT_VERSION, PARSE_ERRORS
from lookonce.cache.model.content_hash import hash_language_model
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.datasets.images import Stamp, stamp
from lookonce.environment import library_versions
from lookonce.files import read_json, write_json
from lookonce.hub import FILES

NOTES = "fingerprints"
NUM_DIGITS = 16


@dataclass(frozen=True)
class Source:
    """What a fingerprint is computed from; taken before the model is read."""

    folder: Path
    """The model folder."""
    settings: dict[str, Any]
    stamps: dict[str, Stamp | None]
    """For each file of the model; None if it was changed just now."""
    libraries: dict[str, str | None]
    code: str
    """The sha256 of the modules that compute fingerprints."""

    @classmethod
    def of(cls, folder: Path, settings: dict[str, Any]) -> Source:
        """`settings` are all values of the run file that change a fingerprint, except for the model."""
        files = sorted({path for pattern in FILES for path in folder.glob(pattern)})
        stamps = {path.name: stamp(path) for path in files}
        code = hashlib.sha256(b"".join(path.read_bytes() for path in code_files()))
        return cls(folder, settings, stamps, library_versions(), code.hexdigest())

    def to_json(self) -> dict[str, Any]:
        stamps = {name: list(one) if one else None for name, one in self.stamps.items()}  # as JSON has them
        return asdict(self) | {"folder": self._real_folder, "stamps": stamps}

    def write_note(self, root: Path, fingerprint: Fingerprint) -> None:
        """Record the fingerprint below `root`, the folder of caches, if that exists and has no such note yet."""
        if self.read_note(root) != fingerprint:
            self._write(root, {"fingerprint": fingerprint.to_json(), "sha256": fingerprint.sha256})

    def read_note(self, root: Path) -> Fingerprint | None:
        """The fingerprint recorded for exactly this source; None if there is none."""
        with contextlib.suppress(OSError, *PARSE_ERRORS):
            if value := self._read(root):
                found = Fingerprint.from_json(value["fingerprint"])
                is_whole = found.sha256 == value["sha256"] and found.format_version == FORMAT_VERSION
                return found if is_whole else None
        return None

    def language_model_hash(self, root: Path) -> str:
        """The hash of the model without its tower: as recorded below `root`, else computed, and recorded there.

        Raises:
            ModelError: a file of weights is broken.
        """
        own = replace(self, settings={"hash": "hash_language_model"})
        with contextlib.suppress(OSError, *PARSE_ERRORS):
            if (value := own._read(root)) and value["sha256"] == _sha256(value["hash"]):
                return str(value["hash"])
        found = hash_language_model(self.folder)
        own._write(root, {"hash": found, "sha256": _sha256(found)})
        return found

    def _read(self, root: Path) -> dict[str, Any] | None:
        """What was recorded for exactly this source; raises OSError or one of PARSE_ERRORS."""
        value: dict[str, Any] = read_json(self._path(root))
        return value if value["source"] == self.to_json() and all(self.stamps.values()) else None

    def _write(self, root: Path, values: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a read-only folder, or one without access
            if root.is_dir() and all(self.stamps.values()):
                write_json(self._path(root), {"source": self.to_json()} | values)

    @property
    def _real_folder(self) -> str:
        """One path for all links to a model; resolved at each use, so a link that was moved fits no stamps."""
        return str(self.folder.resolve())

    def _path(self, root: Path) -> Path:
        name = _sha256(json.dumps([self._real_folder, self.settings], sort_keys=True))
        return root / NOTES / f"{name[:NUM_DIGITS]}.json"


def code_files() -> list[Path]:
    """The modules that compute fingerprints: a change to any of them may change the result."""
    cache = Path(__file__).parents[1]
    store = [cache / "store" / f"{name}.py" for name in ("fingerprint", "dtypes")]
    families = Path(lookonce.families.__file__).parent
    return [cache / "constants.py", *store, *sorted((cache / "model").glob("*.py")), *sorted(families.glob("*.py"))]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
