"""Attention of prompts and of growing answers, which both write their keys and values to the buffers.

Design: transformers' layers are used unchanged; its AttentionInterface
(https://huggingface.co/docs/transformers/attention_interface) calls these functions. A pack of prompts attends to
itself alone, as in training. One token of each growing answer attends to the whole buffer, where the mask leaves it the
tokens of its own prompt and answer: with a dense mask, or by rows. All query heads that read the same key head lie side
by side in a block of rows, which reads its keys once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lookonce.eval.decoding.key_values import keep
from lookonce.train.model.attention import WHOLE_BLOCKS, shared_prefix_attention

PROMPTS = "shared_prefix_prompts"
STEPS = "shared_prefix_steps"
"""Names of these attention implementations in transformers."""
LARGEST_TILE = 64
"""Rows and heads that a kernel takes together at most."""
OPTIONS: dict[str, Any] = {"BACKEND": "TRITON", "BLOCK_N": 64, "num_warps": 4, "num_stages": 3} | WHOLE_BLOCKS
"""FlexAttention's options. Larger tiles, and its own choice of options, took up to 1.8 times as long on an H200."""


def prompt_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, places: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """For AttentionInterface: a pack of prompts attends to itself; its tokens have `places` `[L]`."""
    keep(module, key, value, places)
    return shared_prefix_attention(module, query, key, value, mask, **options)


def step_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, places: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """For AttentionInterface: a token of each answer attends to the buffers; the tokens have `places` `[N]`."""
    keep(module, key, value, places)
    attend = row_attention if isinstance(mask, BlockMask) else shared_prefix_attention
    return attend(module, query, module.kept_keys, module.kept_values, mask, **options)


def row_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, **options: Any
) -> tuple[torch.Tensor, None]:
    """FlexAttention of the queries of branches `[1, heads, N, size]`, in the `rows` `[N]` of the mask."""
    rows, num_heads, size = options["rows"], key.shape[1], query.shape[3]
    heads = query.shape[1] // num_heads
    spread = query.new_zeros(num_heads, mask.seq_lengths[0] // heads, heads, size)
    spread.index_copy_(1, rows, query.view(num_heads, heads, -1, size).transpose(1, 2))
    attended = _flex(spread.view(1, num_heads, -1, size), key, value, mask, options.get("scaling"))
    of_branches = attended.view(num_heads, -1, heads, size).index_select(1, rows)
    return of_branches.permute(1, 0, 2, 3).reshape(1, len(rows), -1, size), None


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: Any) -> torch.Tensor:
    if query.device.type != "cuda":
        written_out: torch.Tensor = flex_attention(query, key, value, block_mask=mask, scale=scale)
        return written_out
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    options = OPTIONS | {"BLOCK_M": tile(mask.BLOCK_SIZE[0])}
    found: torch.Tensor = attend(query, key, value, block_mask=mask, scale=scale, kernel_options=options)
    return found


def tile(block: int) -> int:
    """The largest power of 2 up to `LARGEST_TILE` that divides a block of rows."""
    return min(block & -block, LARGEST_TILE)


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=False)


for name, function in ((PROMPTS, prompt_attention), (STEPS, step_attention)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
