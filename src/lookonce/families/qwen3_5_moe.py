"""Qwen3.5's mixture of experts (https://huggingface.co/Qwen/Qwen3.5-35B-A3B), with Qwen3.5's layers and tower."""

from __future__ import annotations

from dataclasses import replace

from lookonce.families.family import Size
from lookonce.families.qwen3_5 import QWEN3_5, TEXT, TINY, TINY_TOWER, TOWER

TINY_EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
}
EXPERTS = {
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
TEXT_35B = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    name="Qwen3.5-MoE",
    tower_class="Qwen3_5MoeVisionModel",
    sizes={
        "tiny": Size({**TINY, **TINY_EXPERTS}, TINY_TOWER),
        "35b-a3b": Size(TEXT | EXPERTS | TEXT_35B, TOWER),
    },
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
