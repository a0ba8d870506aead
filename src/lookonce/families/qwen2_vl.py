"""Qwen2-VL (https://huggingface.co/Qwen/Qwen2-VL-7B-Instruct): Qwen2.5-VL's language model with an older tower.

The tower has no windows, and its configuration names the size of its output `hidden_size`.
"""

from __future__ import annotations

from lookonce.families.family import VLLM_LORA, Family, Size
from lookonce.families.qwen2_5_vl import TEXT, TINY

QWEN2_VL = Family(
    "qwen2_vl",
    "Qwen2-VL",
    tower_class="Qwen2VisionTransformerPretrainedModel",
    sizes={
        "tiny": Size(TINY, {"depth": 4, "embed_dim": 128, "num_heads": 4, "mlp_ratio": 2}),
        "7b": Size(TEXT, {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}),
    },
    feature_size="hidden_size",
    has_short_last_layer=True,
    vllm_lora=VLLM_LORA,
)
