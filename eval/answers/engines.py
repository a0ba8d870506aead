"""The ways to answer questions, which `eval.engine` chooses: shared prefixes, or transformers' `generate`.

Design: an engine says which dialogues are answered together before the model is loaded. That depends on the questions
and the settings alone, so that an answer has the same bits whichever rank gives it, and whether or not the evaluation
was interrupted. Only if the GPU is out of memory are fewer questions answered together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lookonce.errors import TrainingError
from lookonce.eval.answers.generate import greedy_answers
from lookonce.eval.answers.wave_size import largest_wave, states_per_wave
from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.decoder import Decoder
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.eval.decoding.waves import Room, groups_of, plan_waves
from lookonce.run.open import OpenRun
from lookonce.text import Notify, quiet
from lookonce.train.data.features import FeatureSource
from lookonce.train.data.tokenize import Example
from lookonce.train.model.load import PRECISIONS

MIN_COMPILED = 500
"""Questions from which on passes are compiled and captured on a GPU, which takes about 12 seconds."""
CPU_PACK = 1024
"""Tokens of a pack on a CPU, where attention with a dense mask takes time for all pairs of tokens of a pack."""


Answers = list[list[Answer]]
"""The answers to the questions of each dialogue of a batch."""


class Engine(ABC):
    """Answers questions with a model."""

    @abstractmethod
    def plan(self, dialogues: Sequence[Dialogue]) -> list[list[int]]:
        """The numbers of the dialogues that are answered together."""

    @abstractmethod
    def stream(self, model: Any, batches: Sequence[Sequence[Dialogue]], notify: Notify = quiet) -> Iterator[Answers]:
        """The greedy answers to each batch of dialogues that are answered together, in order."""

    def answers(self, model: Any, dialogues: Sequence[Dialogue], notify: Notify = quiet) -> Answers:
        """The greedy answers to dialogues that are answered together, in order."""
        [found] = self.stream(model, [dialogues], notify)
        return found


def engine_of(opened: OpenRun, source: FeatureSource | None = None, tokens_per_wave: int | None = None) -> Engine:
    """The engine of `eval.engine`; with features of `source` instead of the run's cache, and waves of another size."""
    if opened.run.eval.engine == "generate":
        return Generate(opened, source)
    return SharedPrefixes(opened, source, tokens_per_wave)


@dataclass(frozen=True)
class Generate(Engine):
    """transformers' `generate`, in batches of questions of similar length, so that padding is small."""

    opened: OpenRun
    source: FeatureSource | None = None

    def plan(self, dialogues: Sequence[Dialogue]) -> list[list[int]]:
        order = sorted(range(len(dialogues)), key=lambda number: dialogues[number].first.num_tokens)
        size = self.opened.run.eval.batch_size
        return [order[start : start + size] for start in range(0, len(order), size)]

    def stream(self, model: Any, batches: Sequence[Sequence[Dialogue]], notify: Notify = quiet) -> Iterator[Answers]:
        for batch in batches:
            answers: Answers = [[] for _ in batch]
            while asked := [one for one, found in enumerate(answers) if len(found) < batch[one].num_questions]:
                prompts = [batch[number].prompt(answers[number]) for number in asked]
                for number, answer in zip(asked, self._answers(model, prompts), strict=True):
                    answers[number].append(answer)
            yield answers

    def _answers(self, model: Any, prompts: Sequence[Example]) -> list[Answer]:
        run, tokenizer = self.opened.run, self.opened.chat_tokenizer.tokenizer
        longest = run.eval.max_new_tokens
        collator = self.opened.row_collator(self.source)
        return greedy_answers(model, tokenizer, collator, prompts, longest, run.train.precision)


class SharedPrefixes(Engine):
    """Each image's tokens once for all its questions, whose answers grow together."""

    def __init__(
        self,
        opened: OpenRun,
        source: FeatureSource | None = None,
        tokens_per_wave: int | None = None,
        *,
        min_compiled: int = MIN_COMPILED,
    ) -> None:
        """With `min_compiled` questions or more, passes are compiled and captured, if there is a GPU."""
        self._source, self._chat, self._min_compiled = source or opened.features, opened.chat_tokenizer, min_compiled
        run, model = opened.run, opened.model_folder
        self._dtype = PRECISIONS[run.train.precision]
        on_gpu = torch.cuda.is_available()
        tokens_per_pack = run.batch.tokens_per_pack if on_gpu else min(run.batch.tokens_per_pack, CPU_PACK)
        num_places = tokens_per_wave or run.eval.tokens_per_wave or largest_wave(model, self._dtype)
        self.room = Room(num_places, tokens_per_pack, run.eval.max_new_tokens, states_per_wave(model, num_places))
        self._on_gpu, self._can_compile = on_gpu, run.train.compile
        self._num_planned = 0
        self._decoder: Decoder | None = None

    def plan(self, dialogues: Sequence[Dialogue]) -> list[list[int]]:
        self._num_planned += sum(dialogue.num_questions for dialogue in dialogues)
        return plan_waves(dialogues, self._chat.image_token_id, self.room)

    def stream(self, model: Any, batches: Sequence[Sequence[Dialogue]], notify: Notify = quiet) -> Iterator[Answers]:
        """The greedy answers to each wave; to parts of half its size if the GPU is out of memory.

        Raises:
            TrainingError: one question does not fit.
        """
        left = deque(batches)
        while left:
            parts = [self._parts(wave) for wave in left]
            waves = [[wave[number] for number in part] for wave, some in zip(left, parts, strict=True) for part in some]
            answers = self.decoder_of(model).answers(waves)
            try:
                for some in parts:
                    found = dict(answer for part in some for answer in zip(part, next(answers), strict=True))
                    left.popleft()
                    yield [found[number] for number in range(len(found))]
                return
            except torch.OutOfMemoryError:
                answers.close()
                self._make_less_room(left[0], notify)

    def _parts(self, wave: Sequence[Dialogue]) -> list[list[int]]:
        """The numbers of the dialogues of a wave in parts that there is room for; mostly one."""
        return plan_waves(wave, self._chat.image_token_id, self.room)

    def _make_less_room(self, wave: Sequence[Dialogue], notify: Notify) -> None:
        """Leave room for at most half of a wave from now on."""
        if all(len(part) == 1 for part in self._parts(wave)):
            longest = max((dialogue.first for dialogue in wave), key=lambda example: example.num_tokens)
            raise TrainingError(
                f"the GPU is out of memory for one question of {longest.num_tokens:,} tokens "
                f"({longest.origin}); lower `eval.max_new_tokens` or use a larger GPU"
            ) from None
        groups = groups_of(wave, self._chat.image_token_id)
        num_places = min(sum(self.room.places_of(group, wave) for group in groups), self.room.num_places) // 2
        notify(f"out of memory; answering {num_places:,} tokens at a time; set a lower `eval.tokens_per_wave`")
        self.room, self._decoder = replace(self.room, num_places=num_places), None
        torch.cuda.empty_cache()

    def decoder_of(self, model: Any) -> Decoder:
        """The decoder of a model, which keeps its buffers and captured passes from wave to wave."""
        if self._decoder is None or self._decoder.model is not model:
            is_quick = self._on_gpu and self._num_planned >= self._min_compiled
            self._decoder = Decoder(
                model.eval(),
                self._chat,
                self._source,
                self.room,
                self._dtype,
                by_rows=is_quick,
                compiled=is_quick and self._can_compile,
            )
        return self._decoder
