"""Qwen3-VL's stock vision tower made fast on a GPU, over several images of mixed size at once.

Design: transformers' own forward runs unchanged. Three parts of it that cost an H200 more than the arithmetic they do
are replaced, with the same weights (8B, Kvasir-VQA's image sizes, images a second: 55 one by one, 129 as it is with 32k
patches a forward, 172 with all three; LOG.md has what else was tried):

- rotary position embedding: stock's own function compiled into one kernel; it was eight, and a third of the time;
- attention: one variable-length kernel a layer for all images, where stock calls one an image;
- patch embedding: the Conv3d's stride is its kernel, so it is one matrix product.

What depends on an image's grid alone is worked out once a grid and handed to the stock forward, which takes it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel, apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

varlen_attn: Callable[..., Any] | None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

Grid = tuple[int, int, int]
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]
NUM_GRIDS = 1024
"""How many grids' positions are kept on the device: at most 0.4 MB each."""


class FastTower:
    """A stock vision module, changed in place."""

    def __init__(self, module: Any) -> None:
        """`module` is a `Qwen3VLVisionModel` in its final dtype and on its device, frozen."""
        self.module = module
        self.device: torch.device = module.device
        self.varlen = varlen_attn is not None and self.device.type == "cuda" and module.dtype.itemsize == 2
        rotary = (
            compiled_rotary(self.device, module.dtype) if self.device.type == "cuda" else apply_rotary_pos_emb_vision
        )
        module.patch_embed.proj = _PatchProduct(module.patch_embed.proj)
        for block in module.blocks:
            block.attn = _PackedAttention(block.attn, rotary, self.varlen)
        self._positions = functools.lru_cache(maxsize=NUM_GRIDS)(self._positions_of)

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether a tower is of the kind that this knows."""
        return isinstance(module, Qwen3VLVisionModel)

    def __call__(self, patches: torch.Tensor, grids: Sequence[Grid]) -> Any:
        """What the stock forward gives for `patches` `[sum of t * h * w, patch_dim]` of images with these grids."""
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        cu_seqlens = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
        indices, weights, positions = (torch.cat(parts) for parts in zip(*map(self._positions, grids), strict=True))
        return self.module(
            patches,
            grid_thw=torch.tensor(grids),
            cu_seqlens=cu_seqlens.to(self.device, non_blocking=True) if self.varlen else cu_seqlens,
            max_seqlen=max(lengths),
            position_ids=positions,
            interp_indices=indices,
            interp_weights=weights,
            return_dict=True,
        )

    def _positions_of(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For the patches of a grid: places in the table of position embeddings, their weights, rows and columns."""
        module, grid_thw = self.module, torch.tensor([grid])
        indices, weights = get_vision_interpolation_indices_and_weights(
            grid_thw,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=module.spatial_merge_size,
        )
        positions = get_vision_position_ids(grid_thw, module.spatial_merge_size)
        return indices.to(self.device), weights.to(self.device), positions.to(self.device)


def compiled_rotary(device: torch.device, dtype: torch.dtype) -> Rotary:
    """Stock's rotary embedding as one kernel; as it is where nothing can be compiled (no C compiler, no Triton)."""
    query = torch.zeros(64, 2, 32, device=device, dtype=dtype)
    angle = torch.zeros(64, 32, device=device)
    try:
        compiled: Rotary = torch.compile(apply_rotary_pos_emb_vision, dynamic=True)
        with torch.inference_mode():
            compiled(query, query, angle, angle)
    except Exception:  # the compiler's errors have no base of their own
        return apply_rotary_pos_emb_vision
    return compiled


class _PackedAttention(nn.Module):
    """In place of a block's attention: the same weights, all images of the forward in one call."""

    def __init__(self, stock: Any, rotary: Rotary, varlen: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads = stock.qkv, stock.proj, stock.num_heads
        self.rotary, self.varlen = rotary, varlen

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        max_seqlen: int,
        **_: Any,
    ) -> torch.Tensor:
        num_patches = hidden_states.shape[0]
        query, key, value = self.qkv(hidden_states).view(num_patches, 3, self.num_heads, -1).unbind(1)
        query, key = self.rotary(query, key, *position_embeddings)
        if self.varlen:
            assert varlen_attn is not None
            output = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        else:
            output = attend_by_size(query, key, value, cu_seqlens.diff().tolist())
        projected: torch.Tensor = self.proj(output.reshape(num_patches, -1))
        return projected


def attend_by_size(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Attention within each image, `[num_patches, heads, head_dim]`; neighbours of equal length in one call."""
    runs = [(length, sum(1 for _ in same)) for length, same in itertools.groupby(lengths)]
    sizes = [length * number for length, number in runs]
    outputs = []
    split = (torch.split(tensor, sizes) for tensor in (query, key, value))
    for (length, number), *parts in zip(runs, *split, strict=True):
        batch = (part.unflatten(0, (number, length)).transpose(1, 2) for part in parts)
        outputs.append(functional.scaled_dot_product_attention(*batch).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


class _PatchProduct(nn.Module):
    """In place of the patch embedding's Conv3d."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        assert conv.stride == conv.kernel_size
        self.weight, self.bias = conv.weight, conv.bias  # by these names stock asks for the dtype

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
