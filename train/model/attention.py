"""Who attends to whom in a pack, and the two ways in which that is computed.

The law, in one place: a token attends to itself and to what comes before it in its own run and in its run's prefix. A
run is a prefix (its own prefix is itself), a branch, or the padding at a pack's end. So the questions about an image
see the image and nothing of each other, and no image sees another.

Design: on a GPU, FlexAttention computes only the blocks of 128 x 128 in which somebody attends to somebody; elsewhere
it is a dense mask for PyTorch's own attention. Both reach transformers' layers through its AttentionInterface
(https://huggingface.co/docs/transformers/attention_interface), so that no model code is ours. What the mask depends on
lies in buffers that are overwritten for each pack: the function that FlexAttention was compiled for stays the same, and
nothing is compiled again. The blocks are counted in the dense mask, by the law itself; PyTorch's `create_block_mask`
gives the same and keeps the CPU busy for 10 milliseconds a pack, in which the GPU has nothing to do.

Packs come in whole blocks and the kernels are told so. They would find it out for themselves if they were compiled for
one length; for any length they would check each access, and the backward pass takes twice as long. The option that says
it is one of PyTorch's own that it does not document. Were it renamed, packs would be slower and as right as before.
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
"""Of this attention, among transformers' implementations."""
WHOLE_BLOCKS: dict[str, Any] = {"IS_DIVISIBLE": True}
"""FlexAttention's option for lengths that are such multiples."""
Mask = torch.Tensor | BlockMask


def attends(run_q: Any, prefix_q: Any, place_q: Any, run_k: Any, place_k: Any) -> Any:
    """Whether the token at `place_q`, of the run `run_q` whose prefix is the run `prefix_q`, attends to the other."""
    return (place_k <= place_q) & ((run_k == run_q) | (run_k == prefix_q))


def dense_mask(run: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    """`[1, 1, L, L]`, true where the row's token attends to the column's; `run` and `prefix` are `[L]`."""
    place = torch.arange(len(run), device=run.device)
    allowed: torch.Tensor = attends(run[:, None], prefix[:, None], place[:, None], run[None], place[None])
    return allowed[None, None]


class PackMask:
    """Makes the mask of one pack after another."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        """For packs of up to `max_tokens`, whole blocks."""
        self.device = device
        run, prefix = (torch.zeros(max_tokens, dtype=torch.int32, device=device) for _ in range(2))

        def pack_attends(batch: Any, head: Any, place_q: Any, place_k: Any) -> Any:
            return attends(run[place_q], prefix[place_q], place_q, run[place_k], place_k)

        self._run, self._prefix, self._attends = run, prefix, pack_attends

    def __call__(self, run: torch.Tensor, prefix: torch.Tensor) -> Mask:
        """What the model gets as `attention_mask`; the mask made before loses its meaning.

        `run` and `prefix` `[L]` say of each token which run it is in and which run is that one's prefix.
        """
        return self.blocks(run, prefix) if self.device.type == "cuda" else dense_mask(run, prefix)

    def blocks(self, run: torch.Tensor, prefix: torch.Tensor) -> BlockMask:
        """FlexAttention's, of a pack of whole blocks."""
        length = len(run)
        assert length % BLOCK == 0, length  # else kernels would read past its end
        self._run[:length].copy_(run, non_blocking=True)
        self._prefix[:length].copy_(prefix, non_blocking=True)
        allowed = dense_mask(run, prefix)[0, 0]
        some, every = blocks_of(allowed)
        of_rows, of_columns = (_listed(some), _listed(every)), (_listed(some.T), _listed(every.T))
        return BlockMask(
            (length, length), *of_rows[0], *of_rows[1], *of_columns[0], *of_columns[1], (BLOCK, BLOCK), self._attends
        )


def blocks_of(allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In which blocks of a dense mask `[L, L]` somebody attends to somebody but not all to all, and in which all do."""
    num = len(allowed) // BLOCK
    counts = allowed.view(num, BLOCK, num, BLOCK).sum((1, 3), dtype=torch.int32)
    every = counts == BLOCK * BLOCK
    return (counts > 0) & ~every, every


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of each row are meant, and their columns before all others, as BlockMask has them.

    FlexAttention's kernels take a row's columns to lie side by side, and give wrong gradients if they do not.
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
    """For AttentionInterface: FlexAttention if the mask is a `BlockMask`, else PyTorch's own."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    scale = options.get("scaling")
    attended = attend(
        query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True, kernel_options=WHOLE_BLOCKS
    )
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for whoever gives no mask of a pack
