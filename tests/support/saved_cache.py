"""A cache that was built once, copied for other tests: to build one takes four times as long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lookonce.cache.store.claims import CLAIMS
from lookonce.cache.store.metadata import LEN_CHECKSUM_LINE, checksum_line
from lookonce.cache.store.reader import write_index


@dataclass(frozen=True)
class SavedCache:
    """The files of a cache; None for a folder."""

    place: Path
    """The folder of the images."""
    files: dict[Path, bytes | None]

    @classmethod
    def of(cls, folder: Path, place: Path) -> SavedCache:
        found = [path for path in sorted(folder.rglob("*")) if path.parent.name != CLAIMS]  # of tests that use it now
        files = {path: None if path.is_dir() else path.read_bytes() for path in found}
        return cls(place, {path.relative_to(folder): content for path, content in files.items()})

    def write(self, folder: Path, place: Path, fingerprint: str) -> None:
        """Write them to a new folder, as if the cache had been built there from the same images at another place."""
        for name, content in self.files.items():
            path = folder / name
            if content is None:
                path.mkdir(parents=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content if path.suffix == ".safetensors" else self._moved(content, place))
        write_index(folder, fingerprint)  # it has the modification times of the receipts

    def _moved(self, content: bytes, place: Path) -> bytes:
        """A text file with other paths, and with its checksum if it has one."""
        moved = content.replace(f"{self.place}/".encode(), f"{place}/".encode())
        body = moved[LEN_CHECKSUM_LINE:]
        has_checksum = content[:LEN_CHECKSUM_LINE] == checksum_line(content[LEN_CHECKSUM_LINE:]).encode()
        return checksum_line(body).encode() + body if has_checksum else moved
