"""The vision tower alone: built from its own tensors, run on patches, its outputs stacked level by level.

Level 0 is the merged output, which replaces the image tokens' embeddings; levels 1.. are DeepStack's, added in the
first layers of the language model (https://arxiv.org/abs/2406.04334). The tower computes in the dtype that is stored
(in bfloat16 for fp8), so a bfloat16 cache holds exactly what a bfloat16 model would compute.

Design: on a GPU several images of different sizes are encoded at once, by transformers' own `forward`, unchanged. Three
of its modules are replaced, with the same weights:

- rotary position embedding: the stock function compiled into one kernel; it was eight, and a third of the time;
- attention: one variable-length kernel per layer for all images, where stock calls one per image, or one per window of
  64 patches in most layers of Qwen2.5-VL;
- patch embedding: the Conv3d's stride equals its kernel, so it is one matrix product.

Images per second on an H200 (8B, the image sizes of Kvasir-VQA): 55 one by one, 129 with the stock modules and tower
batches of 32k patches, 172 with all three replaced. LOG.md has what else was tried.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from lookonce.cache.format import Grid
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.environment import limit_cpu_threads
from lookonce.errors import ModelError
from lookonce.text import first_line

varlen_attn: Callable[..., Any] | None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]
NUM_GRIDS = 1024
"""The number of grids whose positions are kept on the device, at most 0.4 MB each."""
TOKENS_PER_TOWER_BATCH = 8192
"""The most image tokens of a tower batch on a GPU."""


@dataclass(frozen=True)
class GridInputs:
    """What a tower takes for an image of one grid."""

    by_patch: dict[str, torch.Tensor]
    """Tensors on the tower's device, which are concatenated for several images: positions, and in towers that
    interpolate their position embeddings the indices and weights of these."""
    window_index: torch.Tensor | None
    """In towers with windows: the image's tokens `[num_tokens]` window by window."""
    window_lengths: list[int]


class FastTower:
    """A stock vision module whose slow parts are replaced in place."""

    def __init__(self, module: Any) -> None:
        """`module` is the frozen tower in its final dtype and on its device."""
        self.module = module
        self.device: torch.device = module.device
        self.varlen = varlen_attn is not None and self.device.type == "cuda" and module.dtype.itemsize == 2
        rotary = sys.modules[type(module).__module__].apply_rotary_pos_emb_vision
        if self.device.type == "cuda":
            rotary = compiled(rotary, self.device, module.dtype)
        module.patch_embed.proj = _PatchProduct(module.patch_embed.proj)
        for block in module.blocks:
            block.attn = _ConcatenatedAttention(block.attn, rotary, self.varlen)
        self._inputs = functools.lru_cache(maxsize=NUM_GRIDS)(self._inputs_of)

    def __call__(self, patches: torch.Tensor, grids: Sequence[Grid]) -> Any:
        """The output of the stock tower for `patches` `[sum of t * h * w, patch_dim]` of images with these grids."""
        inputs = [self._inputs(grid) for grid in grids]
        by_patch = {
            name: torch.cat([image_inputs.by_patch[name] for image_inputs in inputs]) for name in inputs[0].by_patch
        }
        lengths = [h * w for t, h, w in grids for _ in range(t)]
        return self.module(
            patches,
            grid_thw=torch.tensor(grids),
            **by_patch,
            **self._segments("seqlens", "max_seqlen", lengths),
            **(self._windows(inputs) if inputs[0].window_lengths else {}),
            return_dict=True,
        )

    def _segments(self, name: str, longest: str, lengths: list[int]) -> dict[str, Any]:
        """Where the parts of a tower batch end within which patches attend to each other, and the longest part."""
        ends = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
        return {f"cu_{name}": ends.to(self.device, non_blocking=True) if self.varlen else ends, longest: max(lengths)}

    def _windows(self, inputs: Sequence[GridInputs]) -> dict[str, Any]:
        indices: list[torch.Tensor] = [
            image_inputs.window_index for image_inputs in inputs if image_inputs.window_index is not None
        ]
        begins = itertools.accumulate((len(index) for index in indices), initial=0)
        shifted = [index + begin for index, begin in zip(indices, begins, strict=False)]
        lengths = [length for image_inputs in inputs for length in image_inputs.window_lengths]
        segments = self._segments("window_seqlens", "max_window_seqlen", lengths)
        return {"window_index": torch.cat(shifted).to(self.device, non_blocking=True)} | segments

    def _inputs_of(self, grid: Grid) -> GridInputs:
        module, grid_thw = self.module, torch.tensor([grid])
        by_patch = {"position_ids": get_vision_position_ids(grid_thw, module.spatial_merge_size)}
        if hasattr(module, "num_grid_per_side"):
            by_patch["interp_indices"], by_patch["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grid_thw,
                num_grid_per_side=module.num_grid_per_side,
                mode=module.interpolation_mode,
                align_corners=module.interpolation_align_corners,
                spatial_merge_size=module.spatial_merge_size,
            )
        window_index, window_lengths = None, []
        if hasattr(module, "window_size"):
            window_index, ends = get_vision_window_index(
                grid_thw,
                spatial_merge_size=module.spatial_merge_size,
                window_size=module.window_size,
                patch_size=module.patch_size,
            )
            window_lengths = ends.diff().tolist()
        on_device = {name: tensor.to(self.device) for name, tensor in by_patch.items()}
        return GridInputs(on_device, window_index, window_lengths)


def compiled(rotary: Rotary, device: torch.device, dtype: torch.dtype) -> Rotary:
    """The stock rotary embedding as one kernel; with a note, unchanged where it cannot be compiled (no C compiler)."""
    query = torch.zeros(64, 2, 32, device=device, dtype=dtype)
    angle = torch.zeros(64, 32, device=device)
    try:
        fused: Rotary = torch.compile(rotary, dynamic=True)
        with torch.inference_mode():
            fused(query, query, angle, angle)
    except Exception as error:  # the compiler's errors have no common base class
        _notify_of_slow_rotary(f"{type(error).__name__}: {first_line(error)}")
        return rotary
    return fused


@functools.cache  # once a process
def _notify_of_slow_rotary(reason: str) -> None:
    tqdm.write(
        f"compiling the tower's rotary embedding failed ({reason}); images are encoded 1.3 to 1.4 times slower",
        file=sys.stderr,
    )


class _ConcatenatedAttention(nn.Module):
    """Replaces the attention of a block: the same weights, one call for the concatenated images of a tower batch."""

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
    """Attention within each image, `[num_patches, heads, head_dim]`; one call for neighbours of equal length."""
    batches = [(length, sum(1 for _ in same)) for length, same in itertools.groupby(lengths)]
    sizes = [length * number for length, number in batches]
    outputs = []
    split = (torch.split(tensor, sizes) for tensor in (query, key, value))
    for (length, number), *tensors in zip(batches, *split, strict=True):
        inputs = (tensor.unflatten(0, (number, length)).transpose(1, 2) for tensor in tensors)
        outputs.append(functional.scaled_dot_product_attention(*inputs).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


class _PatchProduct(nn.Module):
    """Replaces the Conv3d of the patch embedding by a matrix product."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        assert conv.stride == conv.kernel_size
        self.weight, self.bias = conv.weight, conv.bias  # stock reads the dtype under these names

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class Tower:
    """A vision tower ready to encode."""

    def __init__(
        self,
        model_folder: ModelFolder,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        fast: bool | None = None,
    ) -> None:
        """Build the tower from the tensors of the model folder.

        `fast` replaces modules by faster ones that round differently, by default on GPUs only.

        Raises:
            ModelError: the tensors do not fit the configuration.
        """
        limit_cpu_threads(model_folder.folder)
        self.dtype, self.device = dtype, torch.device(device)
        self.family, self.config = model_folder.family, model_folder.vision_config
        self.merge_size: int = self.config.spatial_merge_size
        self.tokens_per_tower_batch = TOKENS_PER_TOWER_BATCH if self.device.type == "cuda" else 1
        """The most image tokens of a tower batch; a larger image is a batch by itself. On a CPU every image is."""
        self.module = _build(model_folder, dtype).to(self.device)
        fast = self.device.type == "cuda" if fast is None else fast
        self._run = FastTower(self.module) if fast else self._run_stock

    @torch.inference_mode()
    def encode(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """The features of a tower batch, image after image, `[num_tokens, num_levels, hidden]`, on the tower's device.

        `patches` is `[sum of t * h * w, patch_dim]`, `grids` has each image's (t, h, w). An image has
        t * h * w / merge_size**2 tokens.
        """
        output = self._run(patches.to(self.device, self.dtype), grids)
        deepstack = output.deepstack_features if self.family.has_deepstack else ()
        return torch.stack([output.pooler_output, *deepstack], dim=1)

    def _run_stock(self, patches: torch.Tensor, grids: Sequence[Grid]) -> Any:
        return self.module(patches, grid_thw=torch.tensor(grids, device=self.device), return_dict=True)


def _build(model_folder: ModelFolder, dtype: torch.dtype) -> Any:
    config = model_folder.vision_config
    tensors = dict(model_folder.tower_tensors())
    tower_class = model_folder.family.load(model_folder.family.tower_class)
    module, loading = tower_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,  # reported below
        output_loading_info=True,
    )
    problems = [*loading["missing_keys"], *loading["unexpected_keys"], *loading["mismatched_keys"]]
    if problems:
        raise ModelError(
            f"the vision tower in {model_folder.folder} does not fit its configuration: "
            f"{len(problems)} tensors are missing, unknown or of another shape, for example {problems[0]}"
        )
    return module.eval().requires_grad_(False)
