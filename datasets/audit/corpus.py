"""What is audited: some records files, their records as single questions, and what is known of each image.

Design: each image file is read once (`inspect_images`); images come in the order in which a cache is planned.

Two questions are the same if they have the same images, by content, in the same order, the same text before them
(system text and earlier turns) and the same words. Texts are in NFC, in which they are compared. What comes before a
question is a hash that each turn continues, so that the memory of a conversation grows with its turns and not with
their square.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from lookonce.datasets.images import ImageInfo, inspect_images
from lookonce.datasets.records import Collector, Malformed, Record, RecordsFile
from lookonce.errors import UsageError
from lookonce.text import nfc, short_ends

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
    note: str = ""
    """What of the file was left out."""

    @classmethod
    def read(cls, name: str, path: Path, image_root: Path | None) -> CorpusFile:
        """Read a file; malformed records are kept aside. Raises RecordsError if it is missing, or no text."""
        malformed = Collector()
        file = RecordsFile(path, image_root, broken=malformed)
        records = list(file)
        named = [record._replace(place=name + record.place.removeprefix(str(path))) for record in malformed]
        return cls(name, path, records, named, file.note())

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
    def read(cls, paths: Sequence[Path], image_root: Path | None = None, *, decode: bool = False) -> Corpus:
        """Read the files, and inspect every image once.

        Raises:
            RecordsError: a file is missing, or cannot be read as text.
            UsageError: a file is given twice.
        """
        twice = [path for number, path in enumerate(paths) if path.resolve() in {p.resolve() for p in paths[:number]}]
        if twice:
            raise UsageError(f"{twice[0]} is given twice; give each records file once")
        paths = sorted(paths, key=lambda path: not path.name.startswith(TRAIN))
        names = short_ends(paths)
        files = [CorpusFile.read(name, path, image_root) for name, path in zip(names, paths, strict=True)]
        images = {image for file in files for record in file.records for image in record.images}
        return cls(tuple(files), inspect_images(images, decode=decode))

    def identity(self, image: Path) -> str:
        """Return what identifies an image: its key, or its path if the image cannot be read."""
        return self.images[image].key or f"path:{image!s}"


class QuestionAnswer(NamedTuple):
    """One question and its answer."""

    file: str
    origin: str
    """Where its record is: "train.jsonl:12"."""
    images: tuple[str, ...]
    """What identifies the images; see `Corpus.identity`."""
    image_names: str
    """The names of the images' files, for messages."""
    before: int
    """The hash of the system text and the earlier turns."""
    question: str
    answer: str
    references: tuple[str, ...] = ()
    """All correct answers, if the record has several."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """All correct answers, `answer` first."""
        return tuple(dict.fromkeys((self.answer, *self.references)))


def list_questions(corpus: Corpus) -> list[QuestionAnswer]:
    """Return all questions of all files, in order."""
    return [pair for file in corpus.files for record in file.records for pair in _of_record(file, record, corpus)]


def _of_record(file: CorpusFile, record: Record, corpus: Corpus) -> Iterator[QuestionAnswer]:
    images, origin = tuple(map(corpus.identity, record.images)), file.origin(record)
    names = ", ".join(image.name for image in record.images) or "no image"
    references = tuple(map(nfc, record.references))
    before = _hash(0, repr(record.system and nfc(record.system)))
    for turn in (turn.in_nfc for turn in record.turns):
        yield QuestionAnswer(file.name, origin, images, names, before, turn.question, turn.answer, references)
        before = _hash(before, repr((turn.question, turn.answer)))


def _hash(before: int, text: str) -> int:
    """The hash of a text after what has the hash `before`."""
    return int(xxhash.xxh3_128_intdigest(f"{before} {text}".encode()))
