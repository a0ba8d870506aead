"""Let the answers of a wave grow, one token of each in every pass, until all have ended.

Design: answers that have ended leave the wave, which makes the later passes smaller. On a GPU passes have a few sizes,
each with tensors of its own that serve all waves, and the CPU asks only now and then which answers have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lookonce.eval.decoding.branches import Branches
from lookonce.eval.decoding.layout import PADDING, Spans
from lookonce.eval.decoding.passes.attention import rows_of_block
from lookonce.eval.decoding.passes.key_values import KeyValues
from lookonce.eval.decoding.passes.row_mask import Rows
from lookonce.eval.decoding.passes.row_steps import RowSteps
from lookonce.eval.decoding.passes.steps import DenseSteps
from lookonce.train.model.cuda_graphs import Capture
from lookonce.train.model.load import text_model

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
        """`by_rows` chooses the passes of row_steps.py, which are launched without `capture`."""
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
        steps = DenseSteps(self._model, self._end_token_id)
        steps.start(branches, segments)
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
