"""A conversation with a model about some images, in which each question follows the model's own answers.

Design: the chat template puts images before the first question, so other images begin another conversation. Each
question is asked with all turns before it. The features of the images stay with the answerer from question to question.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lookonce.datasets.images import read_bytes
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import UsageError
from lookonce.eval.asking.answerer import Answerer
from lookonce.eval.asking.asked import absolute
from lookonce.eval.decoding.answer import Answer


class Conversation:
    """Questions and answers so far."""

    def __init__(self, answerer: Answerer, images: Sequence[Path] = (), system: str | None = None) -> None:
        """Raises ImageError if an image cannot be read."""
        self._answerer, self._system = answerer, system
        self.show(images)

    def show(self, images: Sequence[Path]) -> None:
        """Begin again, about these images.

        Raises:
            ImageError: one cannot be read; the conversation is then as before.
        """
        found = tuple(map(absolute, images))
        for path in found:
            read_bytes(path)
        self._images = found
        self.reset()

    def reset(self) -> None:
        """Begin again, about the same images."""
        self._turns: tuple[Turn, ...] = ()

    def ask(self, question: str) -> Answer:
        """The answer to a question, which becomes part of the conversation.

        Raises:
            LookonceError: it cannot be answered; the conversation is then as before.
        """
        answer = self._answerer.answer_last(self._record(*self._turns, Turn(question, "")))
        self._turns += (Turn(question, answer.text),)
        return answer

    def save(self, path: Path) -> None:
        """Write the conversation as a record.

        Raises:
            LookonceError: there is none, or the file exists.
        """
        if not self._turns:
            raise UsageError("there is nothing to save; ask a question first")
        if path.exists():
            raise UsageError(f"{path} exists; name another file")
        write_records(path, [self._record(*self._turns)], absolute=True)

    def _record(self, *turns: Turn) -> Record:
        return Record(self._images, turns, self._system, origin="the conversation")
