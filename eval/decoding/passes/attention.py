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

from lookonce.eval.decoding.passes.key_values import keep
from lookonce.train.data.packing import BLOCK
from lookonce.train.model.attention import WHOLE_BLOCKS, shared_prefix_attention

PROMPTS = "shared_prefix_prompts"
STEPS = "shared_prefix_steps"
"""Names of these attention implementations in transformers."""
QUERIES = 64
"""Queries in a block: rows times the query heads that read the same key head, which are filled up to a power of 2."""
OPTIONS = WHOLE_BLOCKS | {"BACKEND": "TRITON", "BLOCK_M": QUERIES, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
"""FlexAttention's options. Larger blocks, and its own choice of options, took up to 1.8 times as long on an H200."""


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
    heads_of_row = QUERIES // rows_of_block(module.config)
    query = query.to(key.dtype)
    num_rows = mask.kv_num_blocks.shape[-1] * rows_of_block(module.config)
    spread = query.new_zeros(num_heads, num_rows, heads_of_row, size)
    spread[:, rows, :heads] = query.view(num_heads, heads, -1, size).transpose(1, 2)
    queries = spread.view(1, num_heads, -1, size)
    attended = _flex(queries, key, value, _of_any_size(mask, queries, key), options.get("scaling"))
    of_branches = attended.view(num_heads, -1, heads_of_row, size)[:, rows, :heads]
    return of_branches.permute(1, 0, 2, 3).reshape(1, len(rows), -1, size), None


def _of_any_size(mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> BlockMask:
    """The mask with the sizes of tensors instead of numbers, for which a compiled pass would be compiled again."""
    lists, absent = (mask.kv_num_blocks, mask.kv_indices), (None, None)
    return BlockMask((query.shape[2], key.shape[2]), *lists, *absent, *absent, *absent, (QUERIES, BLOCK), mask.mask_mod)


def rows_of_block(config: Any) -> int:
    """The rows of a block, for transformers' `config` of a language model."""
    heads = int(config.num_attention_heads // config.num_key_value_heads)
    return QUERIES >> (heads - 1).bit_length()


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, scale: Any) -> torch.Tensor:
    if query.device.type != "cuda":
        written_out: torch.Tensor = flex_attention(query, key, value, block_mask=mask, scale=scale)
        return written_out
    attend: Any = flex_attention if torch.compiler.is_compiling() else _compiled()
    found: torch.Tensor = attend(query, key, value, block_mask=mask, scale=scale, kernel_options=OPTIONS)
    return found


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(flex_attention, dynamic=False)


for name, function in ((PROMPTS, prompt_attention), (STEPS, step_attention)):
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, sdpa_mask)
