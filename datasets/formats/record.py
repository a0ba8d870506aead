"""The data classes `Record` and `Turn`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookonce.text import nfc


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str

    @property
    def in_nfc(self) -> Turn:
        """The turn with its texts in the form in which they are compared."""
        return Turn(nfc(self.question), nfc(self.answer))


@dataclass(frozen=True)
class Context:
    """Answers to earlier questions about the images of a record, which its prompt has."""

    answers: tuple[Turn, ...]
    text: str | None = None
    """The record's first question with these answers in it; None if they are turns before it."""


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
    context: Context | None = None
    """What `data.context` adds to the prompt; no records file has it."""

    @property
    def known(self) -> tuple[Turn, ...]:
        """The answers of the context."""
        return self.context.answers if self.context else ()

    @property
    def shown(self) -> Record:
        """The record with the turns of the prompt, in which the context has become texts or turns."""
        if self.context is None:
            return self
        if self.context.text is None:
            return replace(self, turns=(*self.known, *self.turns), context=None)
        first, *others = self.turns
        return replace(self, turns=(replace(first, question=self.context.text), *others), context=None)

    @property
    def num_given(self) -> int:
        """The number of turns in `shown` that are context, whose answers are not trained on."""
        return len(self.known) if self.context and self.context.text is None else 0

    @property
    def references(self) -> tuple[str, ...]:
        """All correct answers of a record with one turn: a list in its metadata that begins with its answer.

        Any other value under the metadata key `references` is ignored.
        """
        texts = self.metadata.get("references")
        if len(self.turns) != 1 or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return ()
        return tuple(texts) if texts and nfc(texts[0]) == self.turns[0].in_nfc.answer else ()
