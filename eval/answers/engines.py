"""The ways to answer questions, which `eval.engine` chooses: shared prefixes, or transformers' `generate`.

Design: an engine says which questions are answered together before the model is loaded. That depends on the questions
and the settings alone, so that an answer has the same bits whichever rank gives it, and whether or not the evaluation
was interrupted. Only if the GPU is out of memory are fewer questions answered together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lookonce.errors import TrainingError
from lookonce.eval.answers.generate import greedy_answers
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.decoder import Decoder
from lookonce.eval.decoding.waves import Room, plan_waves
from lookonce.text import Notify, count, quiet
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.session import Session
from lookonce.train.model.load import PRECISIONS

CPU_PACK = 1024
"""Tokens of a pack on a CPU, where attention with a dense mask takes time for all pairs of tokens of a pack."""


class Engine(ABC):
    """Answers questions with a model."""

    @abstractmethod
    def plan(self, examples: Sequence[Example]) -> list[list[int]]:
        """The numbers of the questions that are answered together."""

    @abstractmethod
    def stream(
        self, model: Any, batches: Sequence[Sequence[Example]], notify: Notify = quiet
    ) -> Iterator[list[Answer]]:
        """The greedy answers to each batch of questions that are answered together, in order."""

    def answers(self, model: Any, examples: Sequence[Example], notify: Notify = quiet) -> list[Answer]:
        """The greedy answers to questions that are answered together, in order."""
        [found] = self.stream(model, [examples], notify)
        return found


def engine_of(session: Session) -> Engine:
    """The engine of `eval.engine`."""
    engines: dict[str, Callable[[Session], Engine]] = {"shared": SharedPrefixes, "generate": Generate}
    return engines[session.inputs.run.eval.engine](session)


@dataclass(frozen=True)
class Generate(Engine):
    """transformers' `generate`, in batches of questions of similar length, so that padding is small."""

    session: Session

    def plan(self, examples: Sequence[Example]) -> list[list[int]]:
        order = sorted(range(len(examples)), key=lambda number: examples[number].num_tokens)
        size = self.session.inputs.run.eval.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def stream(
        self, model: Any, batches: Sequence[Sequence[Example]], notify: Notify = quiet
    ) -> Iterator[list[Answer]]:
        session, run = self.session, self.session.inputs.run
        tokenizer = session.chat_tokenizer.tokenizer
        for batch in batches:
            yield greedy_answers(
                model, tokenizer, session.collator, batch, run.eval.max_new_tokens, run.train.precision
            )


class SharedPrefixes(Engine):
    """Each image's tokens once for all its questions, whose answers grow together."""

    def __init__(self, session: Session) -> None:
        self.session = session
        options = session.inputs.run
        tokens_per_pack = options.batch.tokens_per_pack
        if not torch.cuda.is_available():
            tokens_per_pack = min(tokens_per_pack, CPU_PACK)
        self.room = Room(options.eval.tokens_per_wave, tokens_per_pack, options.eval.max_new_tokens)
        self._decoder: Decoder | None = None

    def plan(self, examples: Sequence[Example]) -> list[list[int]]:
        return plan_waves(examples, self.session.chat_tokenizer.image_token_id, self.room)

    def stream(
        self, model: Any, batches: Sequence[Sequence[Example]], notify: Notify = quiet
    ) -> Iterator[list[Answer]]:
        """The greedy answers to each wave; to one in two halves if the GPU is out of memory.

        Raises:
            TrainingError: one question does not fit.
        """
        left = deque(batches)
        while left:
            try:
                for found in self.decoder_of(model).answers([*left]):
                    left.popleft()
                    yield found
                return
            except torch.OutOfMemoryError:
                self._make_less_room(left[0], notify)
            wave = left.popleft()
            half = len(wave) // 2
            yield self.answers(model, wave[:half], notify) + self.answers(model, wave[half:], notify)

    def _make_less_room(self, wave: Sequence[Example], notify: Notify) -> None:
        """Answer half as much at a time from now on."""
        if len(wave) == 1:
            raise TrainingError(
                f"the GPU is out of memory for one question of {wave[0].num_tokens:,} tokens "
                f"({wave[0].origin}); lower `eval.max_new_tokens` or use a larger GPU"
            ) from None
        half = count(len(wave) // 2, "question")
        notify(f"out of memory; answering {half} at a time; set a lower `eval.tokens_per_wave`")
        self.room, self._decoder = replace(self.room, num_places=self.room.num_places // 2), None
        torch.cuda.empty_cache()

    def decoder_of(self, model: Any) -> Decoder:
        """The decoder of a model, which keeps its buffers and recorded passes from wave to wave."""
        if self._decoder is None or self._decoder.model is not model:
            session, options = self.session, self.session.inputs.run.train
            self._decoder = Decoder(
                model.eval(),
                session.chat_tokenizer,
                session.collator.source,
                self.room,
                PRECISIONS[options.precision],
                compiled=options.compile and torch.cuda.is_available(),
            )
        return self._decoder
