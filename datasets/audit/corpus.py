"""What is audited: some files of records, and what is known of the images that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lookonce.datasets.audit.pictures import Picture, look_at_pictures
from lookonce.datasets.records import Record, read_records
from lookonce.errors import UsageError

TRAIN = "train"
"""What the names of files for training begin with."""


@dataclass(frozen=True)
class RecordsFile:
    """One file's records."""

    name: str
    """As short as it can be and still be another than the other files'."""
    path: Path
    records: Sequence[Record]

    def place(self, record: Record) -> str:
        """Where a record stands: "train.jsonl:12"."""
        return self.name + record.origin.removeprefix(str(self.path))


@dataclass(frozen=True)
class Material:
    """Files of records and all their images."""

    files: tuple[RecordsFile, ...]
    """The first is the one that is trained on: one whose name says so, else the first that was named."""
    pictures: Mapping[Path, Picture]

    @classmethod
    def read(cls, paths: Sequence[Path], image_root: Path | None = None, *, decode: bool = False) -> Material:
        """Read the files, and look at every image once.

        Raises:
            RecordsError: a file is missing or broken.
            UsageError: a file is named twice.
        """
        twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
        if twice:
            raise UsageError(f"{twice[0]} is named twice; name each records file once")
        paths = sorted(paths, key=lambda path: not path.name.startswith(TRAIN))
        names = short_names(paths)
        files = [
            RecordsFile(name, path, read_records(path, image_root)) for name, path in zip(names, paths, strict=True)
        ]
        images = {image for file in files for record in file.records for image in record.images}
        return cls(tuple(files), look_at_pictures(images, decode=decode))

    def identity(self, image: Path) -> str:
        """What tells an image from others: its content, or its path where it has none."""
        picture = self.pictures[image]
        return picture.key or f"path:{image}"


def short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell it from the others."""
    parts = [path.absolute().parts for path in paths]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-number:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
