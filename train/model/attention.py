"""Attention over packs: which token attends to which, with FlexAttention or a dense mask.

The rule: a token attends to itself and to the tokens that it continues: those before it in its branch, what its branch
shares with the branches before, and its prefix. A pack is a tree in depth-first order, so the tokens that continue a
token lie behind it without a gap, up to an index that the collator knows, `seen_until`. So prefixes may have any number
of levels.

On a GPU, FlexAttention computes only the blocks of 128 x 128 tokens in which at least one pair attends; elsewhere
PyTorch's SDPA takes a dense mask. Both reach transformers' layers through its AttentionInterface
(https://huggingface.co/docs/transformers/attention_interface). `seen_until` is in a buffer that each pack overwrites,
so the mask function that FlexAttention was compiled for stays the same, and a new pack causes no recompilation. Which
blocks have pairs follows from the smallest and the largest `seen_until` of each 128 tokens. PyTorch's
`create_block_mask` gives the same blocks, but keeps the CPU busy for 10 milliseconds per pack while the GPU is idle.

An option tells the kernels that packs come in whole blocks. Kernels for any length check the bounds of each access
otherwise, which doubles the time of the backward pass. PyTorch does not document the option; if it were renamed,
training would be slower but still correct.

Shapes: `L` tokens of the pack with padding, `K` rows of a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lookonce.train.data.packing import BLOCK

NAME = "shared_prefix"
"""Name of this attention implementation in transformers."""
WHOLE_BLOCKS: dict[str, Any] = {"IS_DIVISIBLE": True}
"""FlexAttention's option that promises lengths of whole blocks."""
Mask = torch.Tensor | BlockMask


def attends(position_q: Any, position_k: Any, seen_until_k: Any) -> Any:
    """Whether the token at index `position_q` attends to the one at `position_k`. Takes numbers or tensors."""
    return (position_k <= position_q) & (position_q < seen_until_k)


def dense_mask(seen_until: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """`[1, 1, K, L]`, true where the row's token attends to the column's. `seen_until` is `[L]`.

    `rows` `[K]` are the indices of the rows' tokens, by default all.
    """
    position = torch.arange(len(seen_until), device=seen_until.device)
    allowed: torch.Tensor = attends((position if rows is None else rows)[:, None], position, seen_until)
    return allowed[None, None]


class PackMask:
    """Makes the masks of packs, one after another, in the same buffers."""

    def __init__(self, max_tokens: int, device: torch.device, *, flex: bool = True) -> None:
        """Allocate buffers for packs of up to `max_tokens` tokens, a multiple of the block size.

        Without `flex`, and always without a GPU, masks are dense.
        """
        self.is_dense, self.max_tokens = device.type != "cuda" or not flex, max_tokens
        buffer = torch.zeros(max_tokens, dtype=torch.int32, device=device)

        def pack_attends(batch: Any, head: Any, position_q: Any, position_k: Any) -> Any:
            return attends(position_q, position_k, buffer[position_k])

        rows = torch.zeros(2 * max_tokens, dtype=torch.int64, device=device)  # targets are padded to a power of two

        def rows_attend(batch: Any, head: Any, row: Any, position_k: Any) -> Any:
            return attends(rows[row], position_k, buffer[position_k])

        self._seen_until, self._attends = buffer, pack_attends
        self._rows, self._rows_attend = rows, rows_attend

    def __call__(self, seen_until: torch.Tensor) -> Mask:
        """The model's `attention_mask` for `seen_until` `[L]`. It invalidates the mask of the previous pack."""
        return dense_mask(seen_until) if self.is_dense else self.blocks(seen_until)

    def blocks(self, seen_until: torch.Tensor) -> BlockMask:
        """FlexAttention's mask of a pack of whole blocks."""
        length = len(seen_until)
        assert length % BLOCK == 0, length  # otherwise kernels would read past the end
        self._seen_until[:length].copy_(seen_until, non_blocking=True)
        partial, full = partial_and_full_blocks(seen_until)
        by_row = (*_block_indices(partial), *_block_indices(full))
        by_column = (*_block_indices(partial.T), *_block_indices(full.T))
        return BlockMask((length, length), *by_row, *by_column, (BLOCK, BLOCK), self._attends)

    def of_rows(self, rows: torch.Tensor, seen_until: torch.Tensor) -> Mask:
        """The mask of some queries and all keys, of the pack that this was called for last.

        `rows` `[K]`: the indices of the queries, in any order; for FlexAttention in whole blocks.
        """
        if self.is_dense:
            return dense_mask(seen_until, rows)
        self._rows[: len(rows)].copy_(rows)
        queries, ends = rows.view(-1, BLOCK), seen_until.view(-1, BLOCK)
        first = torch.arange(0, len(seen_until), BLOCK, device=rows.device)
        some = (first <= queries.amax(1, keepdim=True)) & (ends.amax(1) > queries.amin(1, keepdim=True))
        blocks = [_block_indices(mask) for mask in (some, torch.zeros_like(some), some.T, torch.zeros_like(some.T))]
        shape, block = (len(rows), len(seen_until)), (BLOCK, BLOCK)
        return BlockMask(shape, *blocks[0], *blocks[1], *blocks[2], *blocks[3], block, self._rows_attend)


def partial_and_full_blocks(seen_until: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[blocks, blocks]` each: the blocks in which some pairs attend but not all, and those in which all do.

    All later queries below the smallest `seen_until` of a block of keys attend to all of it; from the largest on, none.
    """
    ends = seen_until.view(-1, BLOCK)
    first = torch.arange(0, len(seen_until), BLOCK, device=seen_until.device)
    query, is_later = first[:, None], first[:, None] > first
    some, full = is_later & (ends.amax(1) > query), is_later & (ends.amin(1) >= query + BLOCK)
    return (some & ~full) | (query == first), full  # within a block, each token attends to itself and to none after it


def _block_indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of true blocks in each row, and the row's column indices with the true ones first, as in BlockMask.

    FlexAttention's kernels require a row's indices to be contiguous in memory, and give wrong gradients otherwise.
    """
    chosen = blocks.contiguous().to(torch.int32)[None, None]
    columns = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), columns.to(torch.int32)


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=True)


def shared_prefix_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """For AttentionInterface: FlexAttention if the mask is a `BlockMask`, else SDPA."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    scale = options.get("scaling")
    attended = attend(
        query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True, kernel_options=WHOLE_BLOCKS
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for inputs that are not packs
