"""A conversation with a model about some images, in which each question follows the model's own answers.

Design: the chat template puts images before the first question, so other images begin another conversation. Of each
question its own tokens are computed; keys and values of the images and of the turns before stay (decoding/talk.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from lookonce.datasets.context import NOT_ANSWERED
from lookonce.datasets.images import read_bytes
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import UsageError
from lookonce.eval.asking.answerer import Answerer
from lookonce.eval.asking.asked import absolute
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.talk import Talk
from lookonce.text import count


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
        self._talk: Talk | None = None

    def ask(self, question: str, on_text: Callable[[str], None] = lambda text: None) -> Answer:
        """The answer to a question, which becomes part of the conversation; `on_text` gets its words as they come.

        Raises:
            LookonceError: it cannot be answered; the conversation is then as before.
        """
        turns = (*self._turns, Turn(question, ""))
        asked = self._record(*(Turn(turn.question, NOT_ANSWERED) for turn in turns))
        streamer: Any = _Streamer(self._answerer.tokenizer, on_text)  # it has no types
        with self._answerer.dialogue(asked) as dialogue:
            talk = self._talk or self._answerer.talk()
            try:
                answer = talk.answer(dialogue, lambda token: streamer.put(torch.tensor([token])))
            except torch.OutOfMemoryError:
                raise UsageError(
                    f"the GPU is out of memory for a conversation of {count(len(turns), 'question')}; begin again "
                    "with /reset"
                ) from None
        streamer.end()
        self._talk = talk
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


class _Streamer(TextStreamer):
    """Gives the words of an answer to a function, as soon as they are whole."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)
