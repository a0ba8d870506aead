"""Which keys the tokens of a pass attend to, on a GPU: FlexAttention by rows, each block of which reads one image.

Design: the branches of an image are spread over rows of their own, in blocks, so that a block of rows reads the keys of
one image only, and the reading is shared out over the whole GPU. The rest of the model computes the tokens as they are.
All tensors keep their size and their memory, so one mask serves captured passes. The cost is rows that stay empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from lookonce.eval.decoding.branches import UNUSED, Queries, attends
from lookonce.eval.decoding.layout import PADDING, Spans
from lookonce.eval.decoding.passes.attention import QUERIES
from lookonce.train.data.packing import BLOCK


@dataclass(frozen=True)
class Rows:
    """The rows of a pass's tokens, and the blocks of keys that each block of rows reads."""

    of_token: NDArray[np.int64]
    """The row of each token, `[N]`."""
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    """The first block of keys of each block of rows, and the one behind its last."""

    @classmethod
    def of(cls, spans: Spans, rows_of_block: int) -> Rows:
        """Blocks of rows for tokens with these spans, those of each group one after another."""
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


class RowMask:
    """Masks of passes over the same number of tokens, one after another, in the same tensors."""

    def __init__(self, num_tokens: int, num_blocks: int, rows_of_block: int, num_places: int, device: torch.device):
        """Allocate tensors for `num_tokens` tokens in `num_blocks` blocks of rows.

        `num_places` is the length of the buffer.
        """
        self.rows_of_block, self.num_places = rows_of_block, num_places
        self._num_rows = rows_of_block * (num_blocks + 1)  # the last block is for tokens that are not used

        def column(length: int, value: int = UNUSED) -> torch.Tensor:
            return torch.full((length,), value, dtype=torch.int32, device=device)

        self._segments = column(num_places)
        self.rows = column(num_tokens, self._num_rows - 1).long()
        """The row of each token, `[num_tokens]`."""
        self._segment, self._prefix, self._place = (column(self._num_rows) for _ in range(3))
        self._num_keys = column(num_blocks + 1, 0)[None, None]
        self._keys_of_rows = column((num_blocks + 1) * (num_places // BLOCK), 0).view(1, 1, num_blocks + 1, -1)
        self.blocks = self._block_mask()
        """The model's `attention_mask`."""

    def _block_mask(self) -> BlockMask:
        segments, segment, prefix, place = self._segments, self._segment, self._prefix, self._place
        heads = QUERIES // self.rows_of_block

        def row_attends(batch: Any, head: Any, query: Any, key: Any) -> Any:
            row = query // heads
            return attends(segment[row], prefix[row], place[row], segments[key], key)

        lengths = (self._num_rows * heads, len(segments))
        lists = (self._num_keys, self._keys_of_rows)
        absent = (None, None)  # no block is attended to as a whole, and there are no gradients
        return BlockMask(lengths, *lists, *absent, *absent, *absent, (QUERIES, BLOCK), row_attends)

    def set(self, queries: Queries, segments: torch.Tensor, rows: Rows) -> None:
        """The mask for these tokens, at most `num_tokens`; `segments` are those of the places that are used."""
        self._segments.fill_(UNUSED)
        self._segments[: len(segments)].copy_(segments)
        self.rows.fill_(self._num_rows - 1)
        self.rows[: len(rows.of_token)].copy_(torch.from_numpy(rows.of_token))
        used = self.rows[: len(queries.segment)]
        for column, values in ((self._segment, queries.segment), (self._prefix, queries.prefix)):
            column.fill_(UNUSED)
            column[used] = values.int()
        numbers, indices = torch.from_numpy(rows.end - rows.first), torch.from_numpy(rows.first)
        self._num_keys.zero_()[..., -1] = 1  # unused tokens attend to the padding: a row without keys may be NaN
        self._keys_of_rows[..., -1, 0] = PADDING // BLOCK
        self._num_keys[0, 0, : len(numbers)].copy_(numbers)
        wanted = indices[:, None] + torch.arange(self._keys_of_rows.shape[-1])
        last = self._keys_of_rows.shape[-1] - 1
        self._keys_of_rows[0, 0, : len(indices)].copy_(wanted.clamp(max=last).to(segments.device))

    def set_places(self, places: torch.Tensor) -> None:
        """The place of each token, `[num_tokens]`, which may differ from pass to pass."""
        self._place.index_copy_(0, self.rows, places.int())
