"""A small Qwen3-VL with random weights and a random adapter, without a vision tower.

Design: kernels depend on the size and the number of attention heads more than on anything else, so these are those of
Qwen3-VL-8B where the GPU's kernels are tested, and little else is. The same seed gives the same weights in every
precision: those of bfloat16. The matrices B of the adapter start at zero, which would hide the gradients of A, so they
are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model

from lookonce.datasets.sample.model import make_config, random_model
from lookonce.run.sections.lora import LoraSection
from lookonce.selftest.attention import Heads
from lookonce.selftest.questions import IDS, VOCABULARY
from lookonce.train.model.load import replace_tower
from lookonce.train.model.lora import lora_config

LORA_STD = 0.1
"""Standard deviation of the matrices B of the adapter."""
MROPE = {16: [4, 2, 2], 64: [12, 10, 10], 128: [24, 20, 20]}
"""mRoPE's sections by the size of a head."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of the small model."""

    hidden: int
    num_layers: int
    heads: Heads


def small_model(size: ModelSize, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in `dtype`; its trained weights are float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = _config(size)
        model: Any = random_model(config, 0, torch.float32)
        model = model.bfloat16().to(dtype)  # in all precisions the weights of bfloat16
        replace_tower(model, dtype)
        adapted = get_peft_model(model.requires_grad_(False), lora_config(LoraSection(rank=8)))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, LORA_STD, generator=generator)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted.to(device).train()


def _config(size: ModelSize) -> Any:
    config: Any = make_config("tiny", IDS)
    text: Any = config.text_config
    text.vocab_size, text.hidden_size, text.intermediate_size = VOCABULARY, size.hidden, 2 * size.hidden
    text.num_hidden_layers, text.head_dim = size.num_layers, size.heads.size
    text.num_attention_heads, text.num_key_value_heads = size.heads.num_queries, size.heads.num_keys
    text.rope_parameters = text.rope_parameters | {"mrope_section": MROPE[size.heads.size]}
    config.vision_config.out_hidden_size = size.hidden
    return config
