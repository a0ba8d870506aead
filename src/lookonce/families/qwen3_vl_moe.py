"""Qwen3-VL's mixture of experts (https://huggingface.co/Qwen/Qwen3-VL-30B-A3B-Instruct), with Qwen3-VL's tower.

The experts of a token depend on that token alone, so packs and rows choose the same ones.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families.family import Size
from lookonce.families.qwen3_vl import QWEN3_VL, TEXT, TINY, TOWER

TINY_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
TEXT_30B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    name="Qwen3-VL-MoE",
    tower_class="Qwen3VLMoeVisionModel",
    sizes={
        "tiny": Size({**TINY.text, **TINY_EXPERTS}, TINY.vision),
        "30b-a3b": Size(TEXT | EXPERTS | TEXT_30B | {"num_key_value_heads": 4}, TOWER),
    },
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
