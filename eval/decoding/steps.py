"""Passes that compute one token of every answer of a wave, which attends to its prompt and its answer in the buffer.

Design: the rule of training decides what is attended to, with places in the buffer as positions. Here it is a dense
mask, computed for each pass, and answers that have ended leave the wave. That suits a CPU and small waves;
row_steps.py does the same on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from lookonce.eval.decoding.attention import STEPS
from lookonce.eval.decoding.branches import Branches
from lookonce.train.model.attention import attends
from lookonce.train.model.compile import other_attention


class DenseSteps:
    """Passes with a dense mask, for the branches that have not ended."""

    def __init__(self, model: Any, end_token_id: int) -> None:
        self._model, self._end_token_id = model, end_token_id

    def start(self, branches: Branches, segments: torch.Tensor) -> None:
        """Begin a wave with the first token of each answer. `segments` are those of all places."""
        self.branches, self._segments = branches, segments
        self._places = torch.arange(len(segments), device=segments.device)

    def run(self, number: int) -> None:
        """Add token `number` to each answer."""
        branches = self.branches
        segment, prefix, place = (column[:, None] for column in (branches.segment, branches.prefix, branches.place))
        allowed = attends(segment, prefix, place, self._segments[None], self._places[None])
        logits = forward(self._model, branches, attention_mask=allowed[None, None])
        branches.advance()
        branches.add(torch.tensor([number], device=logits.device), logits, self._end_token_id)

    def drop_ended(self) -> Branches:
        """Let the branches that have ended leave the wave, and return them."""
        ended = self.branches.ended
        dropped, self.branches = (self.branches.subset(chosen.nonzero().flatten()) for chosen in (ended, ~ended))
        return dropped


def forward(model: Any, branches: Branches, **options: Any) -> torch.Tensor:
    """The logits `[N, vocabulary]` after the latest token of each branch."""
    with other_attention(model, STEPS):
        logits: torch.Tensor = model(
            input_ids=branches.latest[None],
            position_ids=branches.position.expand(3, 1, -1),
            places=branches.place,
            use_cache=False,
            **options,
        ).logits
    return logits[0]
