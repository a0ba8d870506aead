"""The data classes `Record` and `Turn`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Record:
    """A conversation of one or more turns about one image, several or none."""

    images: tuple[Path, ...]
    """Absolute, normalized paths, except for `root/../a.jpg`, which leads out of the root and is never opened."""
    turns: tuple[Turn, ...]
    system: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """Where the record was read from, such as "train.jsonl:12"; used in messages."""

    @property
    def references(self) -> tuple[str, ...]:
        """All correct answers of a record with one turn: a list in its metadata that begins with its answer.

        Any other value under the metadata key `references` is ignored.
        """
        texts = self.metadata.get("references")
        if len(self.turns) != 1 or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return ()
        return tuple(texts) if texts and texts[0] == self.turns[0].answer else ()
