"""Answer questions: prompts in packs, then one token of every answer in each pass, then later questions.

Design: which token attends to which is the rule of training (`train.model.attention.attends`), in packs by their
indices and in the buffer by places. The positions of an answer continue from its prompt. So each answer has the tokens
that `generate` gives in a conversation of its own, apart from rounding, while the tokens of an image are computed once.
A later question continues in the keys and values of its conversation, so nothing of it is computed twice. Layers of
linear attention have a state for each conversation instead.

`Decoder` answers waves of questions. Answers that have ended leave the wave, which makes the later passes smaller. On a
GPU passes have a few sizes, each with tensors of its own that serve all waves, and the CPU asks only now and then which
answers have ended.

`Talk` answers the questions of one conversation, one by one. Someone waits for each answer, so its tokens are handed
out as they come. Masks are dense, because FlexAttention would have to be compiled first. The buffer grows with the
conversation; the cost is a copy of it each time. States of linear attention are copied before each question, so that an
error leaves them as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lookonce.eval.decoding.buffers import KeyValues, States
from lookonce.eval.decoding.dialogue import Answer, Dialogue
from lookonce.eval.decoding.passes import (
    DenseSteps,
    FollowUp,
    FollowUps,
    Prompts,
    Rows,
    RowSteps,
    inference,
    rows_of_block,
)
from lookonce.eval.decoding.waves import PADDING, Branches, Room, Spans, WaveLayout, state_rows
from lookonce.train.data.batches import Batch, FeatureSource
from lookonce.train.data.packing import BLOCK
from lookonce.train.data.tokenize import ChatTokenizer
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import text_model
from lookonce.train.model.packs import Capture, cuda_graph_capture

STEPS_BETWEEN_CHECKS = 4
"""Passes on a GPU after which the CPU asks which answers have ended; each time the GPU has to wait."""
BRANCHES = 64
"""The numbers of branches in captured passes are multiples of this."""

Grown = tuple[list[int], list[float]]
"""The tokens of an answer, and their log-probabilities."""


class Growth:
    """Computes answers from their first token to their end."""

    def __init__(
        self, model: Any, max_new_tokens: int, end_token_id: int, *, by_rows: bool, capture: Capture | None
    ) -> None:
        """`by_rows` chooses `RowSteps`, which are launched without `capture`."""
        self._model, self._max_new_tokens, self._end_token_id = model, max_new_tokens, end_token_id
        self._by_rows, self._capture = by_rows, capture
        self._steps: list[RowSteps] = []

    def forget(self) -> None:
        """Free the tensors of all passes, which are of no use for another buffer."""
        self._steps.clear()

    def answers(
        self, branches: Branches, spans: Spans, segments: torch.Tensor, keys: KeyValues
    ) -> Iterator[tuple[int, Grown]]:
        """The answer of each branch, by the number of its question.

        `branches` have their first token; `segments` are those of all places in the buffer.
        """
        grow = self._in_rows(branches, spans, segments, keys) if self._by_rows else self._by_branch(branches, segments)
        for some in [*grow]:
            columns = (some.examples.tolist(), some.tokens.tolist(), some.logprobs.tolist())
            for number, tokens, logprobs in zip(*columns, strict=True):
                yield number, (tokens, logprobs)

    def _by_branch(self, branches: Branches, segments: torch.Tensor) -> Iterator[Branches]:
        """Let answers grow with dense masks; yields branches when they have ended."""
        steps = DenseSteps(self._model, self._end_token_id, branches, segments)
        for number in range(1, self._max_new_tokens):
            yield steps.drop_ended()
            if not len(steps.branches.ended):
                return
            steps.run(number)
        yield steps.branches

    def _in_rows(self, branches: Branches, spans: Spans, segments: torch.Tensor, keys: KeyValues) -> Iterator[Branches]:
        """Let answers grow in passes of a few sizes; yields branches when they have ended and leave the wave."""
        steps = None
        for number in range(1, self._max_new_tokens):
            if number % STEPS_BETWEEN_CHECKS == 1:
                grows = ~branches.ended.cpu().numpy()
                if steps is None or 2 * capacity(grows.sum()) <= steps.num_branches:
                    chosen = torch.from_numpy(grows).to(segments.device)
                    yield branches.subset(~chosen)
                    branches, spans = branches.subset(chosen), spans.subset(grows)
                    if not grows.any():
                        return
                    rows = Rows.of(spans, rows_of_block(text_model(self._model).config))
                    steps = self._steps_for(len(rows.of_token), len(rows.first), keys)
                    branches = steps.start(branches, segments, rows)
            assert steps
            steps.run(number)
        yield branches

    def _steps_for(self, num_branches: int, num_blocks: int, keys: KeyValues) -> RowSteps:
        """Passes for these branches and blocks of rows; those of an earlier wave if they serve."""
        for steps in self._steps:
            if steps.num_branches == capacity(num_branches) and num_blocks <= steps.num_blocks <= 2 * num_blocks + 32:
                return steps
        num_branches, num_blocks = capacity(num_branches), num_blocks + num_blocks // 4
        unused = Branches.unused(num_branches, PADDING, self._max_new_tokens, self._end_token_id, self._model.device)
        steps = RowSteps(self._model, keys.num_places, self._end_token_id, unused, num_blocks, self._capture)
        self._steps.append(steps)
        return steps


def capacity(num_branches: int) -> int:
    """Branches that a captured pass has room for, so that passes of a few sizes serve all waves."""
    return -(-num_branches // BRANCHES) * BRANCHES


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

        `by_rows` chooses FlexAttention and `RowSteps`, which need a compiler on a GPU; otherwise masks
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
        return self._answering(logits, **begun.ahead([one.end for one in follow_ups]))

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


OnToken = Callable[[int], None]


class Talk:
    """The greedy answers to the questions of one dialogue, whose later questions are not known before."""

    def __init__(self, model: Any, chat: ChatTokenizer, source: FeatureSource, room: Room, dtype: torch.dtype) -> None:
        """Passes run under autocast to `dtype`, unless that is float32. There may be more places than `room` has."""
        self._model, self._tokenizer, self._dtype = model, chat.tokenizer, dtype
        self._max_new_tokens, self._end_token_id = room.max_new_tokens, int(chat.tokenizer.eos_token_id)
        self._prompts, self._follow_ups = Prompts(model, chat, source, room), FollowUps(model, by_rows=False)
        self._answers: list[Answer] = []

    def answer(self, dialogue: Dialogue, on_token: OnToken) -> Answer:
        """The answer to the last question of a dialogue; `on_token` gets its tokens.

        The questions before must have been answered by this talk. After an error it continues as if not asked.
        """
        branches, state = self._continued(dialogue) if self._answers else self._begun(dialogue)
        begun = replace(branches, place=branches.place.clone(), position=branches.position.clone())
        state = replace(state, begun=begun, states=state.keys.states.clone())
        answer = self._grown(branches, state, on_token)
        self._answers.append(answer)
        self._state = state
        return answer

    def _begun(self, dialogue: Dialogue) -> tuple[Branches, _State]:
        """Compute the first prompt."""
        with contextlib.closing(self._prompts.ahead([[dialogue]])) as ahead:
            layout, batches = next(ahead)
            segments = torch.from_numpy(layout.segments).to(self._model.device)
            states = States(self._model, layout.num_states, self._dtype)
            keys = KeyValues(self._model, len(segments), self._dtype, states)
            with inference(self._model, self._dtype, keys):
                logits, position = self._prompts.run(batches)
                branches = self._answering(logits, position=position, **layout.starts(segments.device))
        return branches, _State(keys, segments, layout.spans, branches, states)

    def _continued(self, dialogue: Dialogue) -> tuple[Branches, _State]:
        """Compute a later question."""
        follow_up = FollowUp.of(dialogue, len(self._answers) - 1, self._answers[-1])
        begun, states = self._state.begun, self._state.keys.states if follow_up.offset else self._state.states
        state = self._with_places(int(begun.place) + follow_up.end + self._max_new_tokens)
        state = replace(state, keys=state.keys.with_states(states.clone()))
        with inference(self._model, self._dtype, state.keys):
            logits = self._follow_ups.run(begun, [follow_up], state.spans, state.segments, state.keys)
            return self._answering(logits, **begun.ahead([follow_up.end])), state

    def _with_places(self, num_places: int) -> _State:
        """The state with at least `num_places` places; those that are new belong to the conversation."""
        state = self._state
        missing = num_places - len(state.segments)
        if missing <= 0:
            return state
        more = state.begun.segment.expand(max(missing, len(state.segments)))
        segments = torch.cat([state.segments, more])
        keys = KeyValues(self._model, len(segments), self._dtype, state.keys.states)
        keys.load(state.keys)
        return replace(state, keys=keys, segments=segments)

    def _grown(self, branches: Branches, state: _State, on_token: OnToken) -> Answer:
        """Let the answer grow to its end."""
        steps = DenseSteps(self._model, self._end_token_id, branches, state.segments)
        with inference(self._model, self._dtype, state.keys):
            for number in range(1, self._max_new_tokens):
                if branches.ended.item():
                    break
                on_token(int(branches.token))
                steps.run(number)
        if not branches.ended.item():
            on_token(int(branches.token))
        return Answer.of(branches.tokens[0].tolist(), branches.logprobs[0].tolist(), self._tokenizer)

    def _answering(self, logits: torch.Tensor, **columns: torch.Tensor) -> Branches:
        return Branches.answering(logits, self._max_new_tokens, self._end_token_id, **columns)


@dataclass(frozen=True)
class _State:
    """The buffer of a conversation, and where its last answer began."""

    keys: KeyValues
    segments: torch.Tensor
    """Those of all places."""
    spans: Spans
    begun: Branches
    """The branch at the first token of the last answer."""
    states: States
    """Those before the last answer."""
