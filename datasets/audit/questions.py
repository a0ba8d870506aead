"""Records as single questions about images that are known by content.

What makes two questions the same: the same images in the same order, the same text before them (system text and
earlier turns), the same words.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lookonce.datasets.audit.corpus import Material, RecordsFile
from lookonce.datasets.records import Record, Turn


class Asked(NamedTuple):
    """One question and its answer."""

    file: str
    place: str
    """Where its record stands."""
    images: tuple[str, ...]
    """What they are known by; see `Material.identity`."""
    name: str
    """Of the images' files, for messages."""
    before: tuple[str | None, tuple[Turn, ...]]
    question: str
    answer: str
    references: tuple[str, ...] = ()
    """All correct answers, where there are several."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """All answers that are right, the first first."""
        return tuple(dict.fromkeys((self.answer, *self.references)))


def asked(material: Material) -> list[Asked]:
    """All questions of all files, in order."""
    return [question for file in material.files for record in file.records for question in _of(file, record, material)]


def _of(file: RecordsFile, record: Record, material: Material) -> Iterator[Asked]:
    images = tuple(material.identity(image) for image in record.images)
    for number, turn in enumerate(record.turns):
        yield Asked(
            file.name,
            file.place(record),
            images,
            name_of(record.images),
            (record.system, record.turns[:number]),
            turn.question,
            turn.answer,
            record.references,
        )


def name_of(images: tuple[Path, ...]) -> str:
    return ", ".join(image.name for image in images) or "no image"
