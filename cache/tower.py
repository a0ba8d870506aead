"""The vision tower alone: built from its own tensors, run over patches, its outputs gathered level by level.

Level 0 is the merged output that takes the place of the image tokens; levels 1.. are DeepStack's, added to the first
layers of the language model (https://arxiv.org/abs/2406.04334). The tower computes in the dtype that is stored, so a
bfloat16 cache holds just what a bfloat16 model would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import MODEL_MAPPING, PreTrainedConfig

from lookonce.cache.checkpoint import Checkpoint
from lookonce.errors import ModelError

TOKENS_PER_FORWARD = 8192
"""On a GPU."""


def num_levels(config: PreTrainedConfig) -> int:
    """Merged output and DeepStack levels: 4 for Qwen3-VL."""
    return 1 + len(getattr(config, "deepstack_visual_indexes", None) or ())


class Tower:
    """A vision tower ready to encode."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Build the tower from the checkpoint's tensors.

        Raises:
            ModelError: the tensors do not fit the configuration.
        """
        self.dtype, self.device = dtype, torch.device(device)
        self.merge_size: int = checkpoint.vision_config.spatial_merge_size
        self.tokens_per_forward = TOKENS_PER_FORWARD if self.device.type == "cuda" else 1
        """How many image tokens go through it together; at least one image does."""
        self.module = _build(checkpoint, dtype).to(self.device)

    @torch.inference_mode()
    def encode(self, patches: torch.Tensor, grids: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Features of some images, one after the other, `[num_tokens, num_levels, hidden]`, on the tower's device.

        `patches` is `[sum of t * h * w, patch_dim]`, `grids` each image's (t, h, w), of which t * h * w / merge_size**2
        tokens come out.
        """
        grid_thw = torch.tensor(grids, device=self.device)
        output = self.module(patches.to(self.device, self.dtype), grid_thw=grid_thw, return_dict=True)
        levels = [output.pooler_output, *(output.deepstack_features or ())]
        return torch.stack(levels, dim=1)


def _build(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    config = checkpoint.vision_config
    tensors = dict(checkpoint.tower_tensors())
    tower_class: Any = MODEL_MAPPING[type(config)]
    module, loading = tower_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="sdpa",
        ignore_mismatched_sizes=True,  # reported below, in our words
        output_loading_info=True,
    )
    problems = [*loading["missing_keys"], *loading["unexpected_keys"], *loading["mismatched_keys"]]
    if problems:
        raise ModelError(
            f"the vision tower in {checkpoint.folder} does not fit its configuration: "
            f"{len(problems)} tensors are missing, unknown or of another shape, for example {problems[0]}"
        )
    return module.eval().requires_grad_(False)
