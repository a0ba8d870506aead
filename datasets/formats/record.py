"""The nouns: a record and its turns."""

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
    """A conversation of one or more turns about an image, several, or none."""

    images: tuple[Path, ...]
    """Absolute and in their shortest form, but for `root/../a.jpg`, which leads out of the root and is not opened."""
    turns: tuple[Turn, ...]
    system: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """Where it was read from, "train.jsonl:12"; for messages."""

    @property
    def references(self) -> tuple[str, ...]:
        """All right answers of a record that has several: texts in its metadata, the first of which is its only answer.

        Whatever else somebody keeps in metadata by that name is not meant.
        """
        texts = self.metadata.get("references")
        if len(self.turns) != 1 or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return ()
        return tuple(texts) if texts and texts[0] == self.turns[0].answer else ()
