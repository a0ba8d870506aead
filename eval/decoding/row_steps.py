"""Passes that compute one token of every answer on a GPU: FlexAttention by image, captured as a CUDA graph.

Design: the tensors have one size for all waves, so a pass is captured once and replayed for every token; launching its
thousands of kernels would take the CPU longer than the GPU needs for them. The branches of an image are spread over
rows of their own, in blocks, so that a block of rows reads the keys of one image only, and the reading is
shared out over the whole GPU. The rest of the model computes the branches as they are. Branches that have ended are
computed until the wave ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from lookonce.eval.decoding.attention import QUERIES, rows_of_block
from lookonce.eval.decoding.branches import UNUSED, Branches
from lookonce.eval.decoding.layout import PADDING, Spans
from lookonce.eval.decoding.steps import forward
from lookonce.train.data.packing import BLOCK
from lookonce.train.model.attention import attends
from lookonce.train.model.cuda_graphs import Capture
from lookonce.train.model.load import text_model


@dataclass(frozen=True)
class Rows:
    """The rows of a wave's branches, and the blocks of keys that each block of rows reads."""

    of_branch: NDArray[np.int64]
    """The row of each branch, `[N]`."""
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    """The first block of keys of each block of rows, and the one behind its last."""

    @classmethod
    def of(cls, spans: Spans, rows_of_block: int) -> Rows:
        """Blocks of rows for the branches of each group, which follow one another."""
        prefix, first, end = spans.prefix, spans.first, spans.end
        rows = np.empty(len(prefix), dtype=np.int64)
        firsts: list[int] = []
        ends: list[int] = []
        edges = np.flatnonzero(np.diff(prefix, prepend=-1, append=-1))
        for start, stop in zip(edges[:-1], edges[1:], strict=True):
            for begin in range(start, stop, rows_of_block):
                chosen = slice(begin, min(begin + rows_of_block, stop))
                rows[chosen] = rows_of_block * len(firsts) + np.arange(chosen.stop - begin)
                firsts.append(first[begin] // BLOCK)
                ends.append(-(-end[chosen.stop - 1] // BLOCK))
        return cls(rows, np.array(firsts), np.array(ends))


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
        self._rows_of_block = rows_of_block(text_model(model).config)
        self._num_rows = self._rows_of_block * (num_blocks + 1)  # the last block is for unused branches
        device = branches.place.device

        def column(length: int, value: int = UNUSED) -> torch.Tensor:
            return torch.full((length,), value, dtype=torch.int32, device=device)

        self._segments = column(num_places)
        self._rows = column(self.num_branches, self._num_rows - 1).long()
        self._segment, self._prefix, self._place = (column(self._num_rows) for _ in range(3))
        self._num_keys = column(num_blocks + 1, 0)[None, None]
        self._keys_of_rows = column((num_blocks + 1) * (num_places // BLOCK), 0).view(1, 1, num_blocks + 1, -1)
        self._number = torch.zeros(1, dtype=torch.long, device=device)
        self._mask = self._block_mask()
        self._replay: Callable[[], torch.Tensor] | None = None

    def _block_mask(self) -> BlockMask:
        segments, segment, prefix, place = self._segments, self._segment, self._prefix, self._place
        heads = QUERIES // self._rows_of_block

        def row_attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
            row = query // heads
            return attends(segment[row], prefix[row], place[row], segments[key], key)

        lengths = (self._num_rows * heads, len(segments))
        lists = (self._num_keys, self._keys_of_rows)
        absent = (None, None)  # no block is attended to as a whole, and there are no gradients
        return BlockMask(lengths, *lists, *absent, *absent, *absent, (QUERIES, BLOCK), row_attends)

    def start(self, branches: Branches, segments: torch.Tensor, rows: Rows) -> Branches:
        """Take over some branches; returns them in the tensors of the passes.

        `segments` are those of the places that are used.
        """
        device = segments.device
        self._segments.fill_(UNUSED)
        self._segments[: len(segments)].copy_(segments)
        self.branches.ended.fill_(True)
        self.branches.place.fill_(PADDING)
        self.branches.load(branches)
        self._rows.fill_(self._num_rows - 1)
        self._rows[: len(rows.of_branch)].copy_(torch.from_numpy(rows.of_branch))
        for column, values in ((self._segment, branches.segment), (self._prefix, branches.prefix)):
            column.fill_(UNUSED)
            column[self._rows[: len(values)]] = values.int()
        numbers, indices = torch.from_numpy(rows.end - rows.first), torch.from_numpy(rows.first)
        self._num_keys.zero_()[..., -1] = 1  # unused branches attend to the padding: a row without keys may be NaN
        self._keys_of_rows[..., -1, 0] = PADDING // BLOCK
        self._num_keys[0, 0, : len(numbers)].copy_(numbers)
        wanted = indices[:, None] + torch.arange(self._keys_of_rows.shape[-1])
        self._keys_of_rows[0, 0, : len(indices)].copy_(wanted.clamp(max=self._keys_of_rows.shape[-1] - 1).to(device))
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
        self._place.index_copy_(0, self._rows, branches.place.int())
        logits = forward(self._model, branches, attention_mask=self._mask, rows=self._rows)
        branches.advance()
        branches.add(self._number, logits, self._end_token_id)
        return branches.ended
