"""One conversation, question by question, in keys and values that stay: the image is computed once.

Design: someone waits for each answer, so its tokens are handed out as they come. Masks are dense, because FlexAttention
would have to be compiled first. The buffer grows with the conversation; the cost is a copy of it each time. States of
linear attention are copied before each question, so that an error leaves them as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.branches import Branches
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.eval.decoding.layout import Spans
from lookonce.eval.decoding.passes.follow_ups import FollowUp, FollowUps
from lookonce.eval.decoding.passes.inference import inference
from lookonce.eval.decoding.passes.key_values import KeyValues
from lookonce.eval.decoding.passes.prompts import Prompts
from lookonce.eval.decoding.passes.states import States
from lookonce.eval.decoding.passes.steps import DenseSteps
from lookonce.eval.decoding.waves import Room
from lookonce.train.data.batches import FeatureSource
from lookonce.train.data.tokenize import ChatTokenizer

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
            columns = {"place": begun.place + follow_up.end, "position": begun.position + follow_up.end}
            same = {"examples": begun.examples, "segment": begun.segment, "prefix": begun.prefix}
            return self._answering(logits, **columns, **same), state

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
        steps = DenseSteps(self._model, self._end_token_id)
        with inference(self._model, self._dtype, state.keys):
            steps.start(branches, state.segments)
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
