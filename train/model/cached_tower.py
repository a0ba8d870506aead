"""`CachedVisionTower`: the module that replaces the vision tower.

Design: its input is features where the tower's is patches, and its output is the tower's. The rest of the model is
stock: it embeds text, scatters level 0 over the image tokens and adds the DeepStack levels in its first layers
(https://github.com/huggingface/transformers, models/qwen3_vl/modeling_qwen3_vl.py), so generate, PEFT and Trainer work
unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lookonce.families.lookup import family_of


class CachedVisionTower(nn.Module):
    """Returns cached features as a vision tower's output. It has no parameters."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        """`config` is the model's. The model casts features to `dtype` before it passes them here."""
        super().__init__()
        family: Any = family_of(config)
        self.spatial_merge_size: int = config.vision_config.spatial_merge_size
        self.dtype = dtype
        self._with_deepstack = family.load("BaseModelOutputWithDeepstackFeatures") if family.has_deepstack else None

    def forward(
        self, hidden_states: torch.Tensor, grid_thw: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """`hidden_states` `[num_tokens, num_levels, hidden]` are the features of all images of the batch."""
        merged, *deepstack = hidden_states.unbind(dim=1)
        if self._with_deepstack is None:
            return BaseModelOutputWithPooling(pooler_output=merged)
        output: BaseModelOutputWithPooling = self._with_deepstack(pooler_output=merged, deepstack_features=deepstack)
        return output


def replace_tower(model: Any, dtype: torch.dtype) -> None:
    """Put a `CachedVisionTower` in the place of the tower of transformers' model."""
    setattr(model.model, family_of(model.config).tower, CachedVisionTower(model.config, dtype))
