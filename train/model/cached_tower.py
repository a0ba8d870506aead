"""`CachedVisionTower`: the module that takes the vision tower's place.

Design: it is given features where the tower would be given patches, and answers what the tower would answer. All else
of the model is stock: it embeds text, scatters level 0 over the image tokens and adds the DeepStack levels in its first
layers (https://github.com/huggingface/transformers, models/qwen3_vl/modeling_qwen3_vl.py), so generate, PEFT and
Trainer work as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures


class CachedVisionTower(nn.Module):
    """Passes features on as a vision tower's output; has no parameters."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        """`config` is the vision tower's; `dtype` is what the model casts features to before they come here."""
        super().__init__()
        self.spatial_merge_size: int = config.spatial_merge_size
        self.dtype = dtype

    def forward(
        self, hidden_states: torch.Tensor, grid_thw: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithDeepstackFeatures:
        """`hidden_states` are the features of all images of the batch, `[num_tokens, num_levels, hidden]`."""
        merged, *deepstack = hidden_states.unbind(dim=1)
        return BaseModelOutputWithDeepstackFeatures(pooler_output=merged, deepstack_features=deepstack)
