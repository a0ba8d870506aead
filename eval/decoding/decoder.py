"""Answer a wave of questions: its prompts in packs, then one token of every answer in each pass, then later questions.

Design: which token attends to which is the rule of training (`train.model.attention.attends`), in packs by their
indices and in the buffer by places. The positions of an answer continue from its prompt. So each answer has the tokens
that `generate` gives in a conversation of its own, apart from rounding, while the tokens of an image are computed once.
A later question continues in the keys and values of its conversation, so nothing of it is computed twice. Layers of
linear attention have a state for each conversation instead (passes/states.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.branches import Branches
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.eval.decoding.growth import Grown, Growth
from lookonce.eval.decoding.layout import Spans, WaveLayout, state_rows
from lookonce.eval.decoding.passes.follow_ups import FollowUp, FollowUps
from lookonce.eval.decoding.passes.inference import inference
from lookonce.eval.decoding.passes.key_values import KeyValues
from lookonce.eval.decoding.passes.prompts import Prompts
from lookonce.eval.decoding.passes.states import States
from lookonce.eval.decoding.waves import Room
from lookonce.train.data.batches import Batch, FeatureSource
from lookonce.train.data.packing import BLOCK
from lookonce.train.data.tokenize import ChatTokenizer
from lookonce.train.model.cuda_graphs import cuda_graph_capture
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import text_model


class Decoder:
    """Greedy answers of a model, which may have an adapter, to waves of questions."""

    def __init__(
        self,
        model: Any,
        chat: ChatTokenizer,
        source: FeatureSource,
        room: Room,
        dtype: torch.dtype,
        *,
        by_rows: bool = False,
        compiled: bool = False,
    ) -> None:
        """Passes run under autocast to `dtype`, unless that is float32.

        `by_rows` chooses FlexAttention and the passes of row_steps.py, which need a compiler on a GPU; otherwise masks
        are dense. `compiled` compiles the decoder layers, and on a GPU captures the passes by rows as CUDA graphs,
        but not those of models with linear attention.
        """
        self.model, self.chat, self.room, self.dtype = model, chat, room, dtype
        self.device: torch.device = model.device
        self.end_token_id = int(chat.tokenizer.eos_token_id)
        self._compiled, self._by_rows = compiled, by_rows
        captures = compiled and self.device.type == "cuda" and not linear_layers(text_model(model))
        capture = cuda_graph_capture() if captures else None
        self._prompts = Prompts(model, chat, source, room, flex=by_rows)
        self._growth = Growth(model, room.max_new_tokens, self.end_token_id, by_rows=by_rows, capture=capture)
        self._follow_ups = FollowUps(model, by_rows=by_rows)
        self._keys: KeyValues | None = None

    def answers(self, waves: Iterable[Sequence[Dialogue]]) -> Generator[list[list[Answer]]]:
        """The answers to the questions of each dialogue of each wave, in order.

        Texts are decoded, and used by the caller, while the GPU computes the prompts of the next wave.
        """
        done: list[list[Grown]] = []
        try:
            for layout, branches, keys in self._begun(waves):
                if done:
                    yield self._read(done)
                done = []
                done = self._finished(layout, branches, keys)
        except torch.OutOfMemoryError:
            if done:
                yield self._read(done)
            raise
        if done:
            yield self._read(done)

    def first_tokens(self, waves: Iterable[Sequence[Dialogue]]) -> Iterator[torch.Tensor]:
        """The first token of each first answer, which is known when the prompts have been computed."""
        for _, branches, _ in self._begun(waves):
            yield branches.token

    def _begun(self, waves: Iterable[Sequence[Dialogue]]) -> Iterator[tuple[WaveLayout, Branches, KeyValues]]:
        """Compute the first prompts of each wave."""
        with contextlib.closing(self._prompts.ahead(waves)) as ahead:
            for layout, batches in ahead:
                keys = self._buffer(len(layout.segments), layout.num_states)
                with self._passes(keys):
                    branches = self._begin(layout, batches)
                yield layout, branches, keys

    def _finished(self, layout: WaveLayout, branches: Branches, keys: KeyValues) -> list[list[Grown]]:
        """Let the answers of a wave grow to their end, question after question; in the order of its dialogues."""
        answers: list[list[Grown]] = [[] for _ in layout.dialogues]
        segments, spans = torch.from_numpy(layout.segments).to(self.device), layout.spans
        with self._passes(keys):
            while True:
                begun = replace(branches, place=branches.place.clone(), position=branches.position.clone())
                self._save(begun, layout, keys)
                for number, grown in self._growth.answers(branches, spans, segments, keys):
                    answers[number].append(grown)
                numbers = begun.examples.tolist()
                next_ones = [self._follow_up(layout.dialogues[number], answers[number]) for number in numbers]
                if not any(next_ones):
                    return answers
                goes_on = np.array([one is not None for one in next_ones])
                begun, spans = begun.subset(torch.from_numpy(goes_on).to(self.device)), spans.subset(goes_on)
                follow_ups = [one for one in next_ones if one]
                self._restore(begun, follow_ups, layout, keys)
                branches = self._continued(begun, follow_ups, spans, segments, keys)

    def _save(self, begun: Branches, layout: WaveLayout, keys: KeyValues) -> None:
        """Copy the states before the answers that others may follow."""
        if layout.copies:
            numbers = [number for number in begun.examples.tolist() if number in layout.copies]
            keys.states.copy([*map(state_rows, numbers)], [layout.copies[number] for number in numbers])

    def _restore(self, begun: Branches, follow_ups: Sequence[FollowUp], layout: WaveLayout, keys: KeyValues) -> None:
        """Take back the states of conversations in which an answer is replaced by another text."""
        pairs = zip(begun.examples.tolist(), follow_ups, strict=True)
        numbers = [number for number, follow_up in pairs if not follow_up.offset]
        keys.states.copy([layout.copies[number] for number in numbers], [*map(state_rows, numbers)])

    def _follow_up(self, dialogue: Dialogue, answers: Sequence[Grown]) -> FollowUp | None:
        """What is asked after some answers; None if that was all."""
        if len(answers) == dialogue.num_questions:
            return None
        return FollowUp.of(dialogue, len(answers) - 1, self._answer(answers[-1]))

    def _continued(
        self, begun: Branches, follow_ups: Sequence[FollowUp], spans: Spans, segments: torch.Tensor, keys: KeyValues
    ) -> Branches:
        """Compute later questions; the branches have the first token of each answer."""
        logits = self._follow_ups.run(begun, follow_ups, spans, segments, keys)
        ahead = torch.tensor([one.end for one in follow_ups], device=self.device)
        columns = {"place": begun.place + ahead, "position": begun.position + ahead}
        return self._answering(logits, examples=begun.examples, segment=begun.segment, prefix=begun.prefix, **columns)

    def _read(self, done: Sequence[Sequence[Grown]]) -> list[list[Answer]]:
        return [[self._answer(grown) for grown in some] for some in done]

    def _answer(self, grown: Grown) -> Answer:
        return Answer.of(*grown, self.chat.tokenizer)

    def _passes(self, keys: KeyValues) -> AbstractContextManager[None]:
        return inference(self.model, self.dtype, keys, compiled=self._compiled)

    def _begin(self, layout: WaveLayout, batches: Iterable[Batch]) -> Branches:
        """Compute a wave's prompts; its branches have the first token of each answer."""
        logits, positions = self._prompts.run(batches)
        return self._answering(logits, position=positions, **layout.starts(self.device))

    def _answering(self, logits: torch.Tensor, **columns: torch.Tensor) -> Branches:
        return Branches.answering(logits, self.room.max_new_tokens, self.end_token_id, **columns)

    def _buffer(self, num_places: int, num_states: int) -> KeyValues:
        """The buffers of a wave: some of its own, or those of all waves, in whole blocks."""
        if not self._by_rows:
            return self._allocated(num_places, num_states)
        if self._keys is None or not self._keys.has_room(num_places, num_states):
            self._growth.forget()
            num_places = -(-max(num_places, self.room.num_places + 1) // BLOCK) * BLOCK
            self._keys = self._allocated(num_places, max(num_states, (self.room.num_states or 0) + 1))
        return self._keys

    def _allocated(self, num_places: int, num_states: int) -> KeyValues:
        return KeyValues(self.model, num_places, self.dtype, States(self.model, num_states, self.dtype))
