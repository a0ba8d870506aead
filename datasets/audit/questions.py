"""Records as single questions about images, which are identified by content.

Two questions are the same if they have the same images in the same order, the same text before them (system text and
earlier turns) and the same words. Texts are in NFC, in which they are compared. What comes before a question is a
hash that each turn continues, so that the memory of a conversation grows with its turns and not with their square.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from lookonce.datasets.audit.corpus import Corpus, CorpusFile
from lookonce.datasets.records import Record
from lookonce.text import nfc


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
    return [one for file in corpus.files for record in file.records for one in _of_record(file, record, corpus)]


def _of_record(file: CorpusFile, record: Record, corpus: Corpus) -> Iterator[QuestionAnswer]:
    images, names, origin = tuple(map(corpus.identity, record.images)), _names(record.images), file.origin(record)
    references = tuple(map(nfc, record.references))
    before = _hash(0, repr(record.system and nfc(record.system)))
    for turn in (turn.in_nfc for turn in record.turns):
        yield QuestionAnswer(file.name, origin, images, names, before, turn.question, turn.answer, references)
        before = _hash(before, repr((turn.question, turn.answer)))


def _hash(before: int, text: str) -> int:
    """The hash of a text after what has the hash `before`."""
    return int(xxhash.xxh3_128_intdigest(f"{before} {text}".encode()))


def _names(images: tuple[Path, ...]) -> str:
    return ", ".join(image.name for image in images) or "no image"
