"""Passes that compute one token of every answer on a GPU: FlexAttention by image, captured as a CUDA graph.

Design: the tensors have one size for all waves, so a pass is captured once and replayed for every token; launching its
thousands of kernels would take the CPU longer than the GPU needs for them. Branches that have ended are computed until
the wave ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lookonce.eval.decoding.branches import Branches
from lookonce.eval.decoding.layout import PADDING
from lookonce.eval.decoding.passes.attention import rows_of_block
from lookonce.eval.decoding.passes.row_mask import RowMask, Rows
from lookonce.eval.decoding.passes.states import Continued
from lookonce.eval.decoding.passes.steps import forward
from lookonce.train.model.cuda_graphs import Capture
from lookonce.train.model.linear_attention import masks_with
from lookonce.train.model.load import text_model


class RowSteps:
    """Passes over the same tensors in all waves."""

    def __init__(
        self,
        model: Any,
        num_places: int,
        end_token_id: int,
        branches: Branches,
        num_blocks: int,
        capture: Capture | None,
    ) -> None:
        """Allocate tensors for as many branches as there are in `branches`, and `num_blocks` blocks of rows.

        `num_places` is the length of the buffer. Without `capture` each pass is launched.
        """
        self.branches, self.num_branches, self.num_blocks = branches, len(branches.place), num_blocks
        self._model, self._end_token_id, self._capture = model, end_token_id, capture
        device, rows = branches.place.device, rows_of_block(text_model(model).config)
        self._mask = RowMask(self.num_branches, num_blocks, rows, num_places, device)
        self._number = torch.zeros(1, dtype=torch.long, device=device)
        self._replay: Callable[[], torch.Tensor] | None = None

    def start(self, branches: Branches, segments: torch.Tensor, rows: Rows) -> Branches:
        """Take over some branches; returns them in the tensors of the passes.

        `segments` are those of the places that are used.
        """
        self.branches.ended.fill_(True)
        self.branches.place.fill_(PADDING)
        self.branches.load(branches)
        self._mask.set(branches, segments, rows)
        return self.branches.subset(slice(len(branches.place)))

    def run(self, number: int) -> None:
        """Add token `number` to each answer."""
        self._number.fill_(number)
        if self._capture is None:
            self._pass()
        elif self._replay:
            self._replay()
        else:
            self._pass()  # compiles what cannot be compiled in a capture
            self._replay = self._capture(self._pass)

    def _pass(self) -> torch.Tensor:
        branches = self.branches
        self._mask.set_places(branches.place)
        mask = masks_with(self._model, self._mask.blocks, lambda: Continued.by_a_token(branches))
        logits = forward(self._model, branches, attention_mask=mask, rows=self._mask.rows)
        branches.advance()
        branches.add(self._number, logits, self._end_token_id)
        return branches.ended
