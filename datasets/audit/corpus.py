"""What is audited: some records files, and what is known of the images that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lookonce.datasets.audit.image_info import ImageInfo, inspect_images
from lookonce.datasets.malformed import Collector, Malformed
from lookonce.datasets.records import Record, RecordsFile
from lookonce.errors import UsageError

TRAIN = "train"
"""The file whose name begins with this is the one that is trained on."""


@dataclass(frozen=True)
class CorpusFile:
    """The records of one file."""

    name: str
    """The last parts of the path, as many as tell it from the other files."""
    path: Path
    records: Sequence[Record]
    malformed: Sequence[Malformed] = ()
    """The records that cannot be read."""
    num_coerced: int = 0
    """Answers that are numbers or booleans, read as text."""
    note: str = ""
    """What of the file was left out."""

    @classmethod
    def read(cls, name: str, path: Path, image_root: Path | None, *, coerce_answers: bool) -> CorpusFile:
        """Read a file; malformed records are kept aside.

        Raises:
            RecordsError: there is no such file, or it cannot be read as text.
        """
        malformed = Collector()
        file = RecordsFile(path, image_root, coerce_answers=coerce_answers, broken=malformed)
        records = list(file)
        named = [one._replace(place=name + one.place.removeprefix(str(path))) for one in malformed]
        return cls(name, path, records, named, file.num_coerced, file.note())

    def origin(self, record: Record) -> str:
        """Return where the record is, with the short name of the file: "train.jsonl:12"."""
        return self.name + record.origin.removeprefix(str(self.path))


@dataclass(frozen=True)
class Corpus:
    """Records files and all their images."""

    files: tuple[CorpusFile, ...]
    """The first is the one that is trained on: the one named `train...`, else the first that was given."""
    images: Mapping[Path, ImageInfo]

    @classmethod
    def read(
        cls,
        paths: Sequence[Path],
        image_root: Path | None = None,
        *,
        decode: bool = False,
        coerce_answers: bool = False,
    ) -> Corpus:
        """Read the files, and inspect every image once. `coerce_answers` reads numbers and booleans as answers.

        Raises:
            RecordsError: a file is missing, or cannot be read as text.
            UsageError: a file is given twice.
        """
        twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
        if twice:
            raise UsageError(f"{twice[0]} is given twice; give each records file once")
        paths = sorted(paths, key=lambda path: not path.name.startswith(TRAIN))
        names = short_names(paths)
        files = [
            CorpusFile.read(name, path, image_root, coerce_answers=coerce_answers)
            for name, path in zip(names, paths, strict=True)
        ]
        images = {image for file in files for record in file.records for image in record.images}
        return cls(tuple(files), inspect_images(images, decode=decode))

    def identity(self, image: Path) -> str:
        """Return what identifies an image: its key, or its path if the image cannot be read."""
        return self.images[image].key or f"path:{image!s}"


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as tell it from the others."""
    parts = [path.absolute().parts for path in paths]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-number:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
