"""Records as single questions about images, which are identified by content.

Two questions are the same if they have the same images in the same order, the same text before them (system text and
earlier turns) and the same words.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lookonce.datasets.audit.corpus import Corpus, CorpusFile
from lookonce.datasets.records import Record, Turn


class QuestionAnswer(NamedTuple):
    """One question and its answer."""

    file: str
    origin: str
    """Where its record is: "train.jsonl:12"."""
    images: tuple[str, ...]
    """What identifies the images; see `Corpus.identity`."""
    image_names: str
    """The names of the images' files, for messages."""
    context: tuple[str | None, tuple[Turn, ...]]
    """The system text and the earlier turns."""
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
    return [one for file in corpus.files for record in file.records for one in _of_record(file, record, corpus)]


def _of_record(file: CorpusFile, record: Record, corpus: Corpus) -> Iterator[QuestionAnswer]:
    images = tuple(corpus.identity(image) for image in record.images)
    for number, turn in enumerate(record.turns):
        yield QuestionAnswer(
            file.name,
            file.origin(record),
            images,
            _names(record.images),
            (record.system, record.turns[:number]),
            turn.question,
            turn.answer,
            record.references,
        )


def _names(images: tuple[Path, ...]) -> str:
    return ", ".join(image.name for image in images) or "no image"
