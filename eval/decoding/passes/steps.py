"""Passes that compute one token of every answer of a wave, which attends to its prompt and its answer in the buffer.

Design: the rule of training decides what is attended to, with places in the buffer as positions. Here it is a dense
mask, computed for each pass, and answers that have ended leave the wave. That suits a CPU and small waves;
row_steps.py does the same on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from lookonce.eval.decoding.branches import Branches, Queries, attends
from lookonce.eval.decoding.passes.attention import STEPS
from lookonce.eval.decoding.passes.states import Continued
from lookonce.train.model.compile import other_attention
from lookonce.train.model.linear_attention import masks_with


class DenseSteps:
    """Passes with a dense mask, for the branches that have not ended."""

    def __init__(self, model: Any, end_token_id: int) -> None:
        self._model, self._end_token_id = model, end_token_id

    def start(self, branches: Branches, segments: torch.Tensor) -> None:
        """Begin a wave with the first token of each answer. `segments` are those of all places."""
        self.branches, self._segments = branches, segments

    def run(self, number: int) -> None:
        """Add token `number` to each answer."""
        branches = self.branches
        mask = masks_with(self._model, dense_mask(branches, self._segments), lambda: Continued.by_a_token(branches))
        logits = forward(self._model, branches, attention_mask=mask)
        branches.advance()
        branches.add(torch.tensor([number], device=logits.device), logits, self._end_token_id)

    def drop_ended(self) -> Branches:
        """Let the branches that have ended leave the wave, and return them."""
        ended = self.branches.ended
        dropped, self.branches = (self.branches.subset(chosen.nonzero().flatten()) for chosen in (ended, ~ended))
        return dropped


def dense_mask(queries: Queries, segments: torch.Tensor) -> torch.Tensor:
    """`[1, 1, N, num_places]`, true where a token attends to a place; `segments` are those of all places."""
    segment, prefix, place = (column[:, None] for column in (queries.segment, queries.prefix, queries.place))
    places = torch.arange(len(segments), device=segments.device)
    allowed: torch.Tensor = attends(segment, prefix, place, segments[None], places[None])
    return allowed[None, None]


def forward(model: Any, queries: Queries, **options: Any) -> torch.Tensor:
    """The logits `[N, vocabulary]` after each token."""
    with other_attention(model, STEPS):
        logits: torch.Tensor = model(
            input_ids=queries.token[None],
            position_ids=queries.position.expand(3, 1, -1),
            places=queries.place,
            use_cache=False,
            **options,
        ).logits
    return logits[0]
