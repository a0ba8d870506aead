"""Qwen3.5 (https://huggingface.co/Qwen/Qwen3.5-9B): linear attention in three of four layers, no DeepStack.

Its mixture of experts (https://huggingface.co/Qwen/Qwen3.5-35B-A3B) has the same layers and tower.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families.family import TINY_EXPERTS, TINY_ROPE, TINY_TEXT, TINY_TOWER, Family, Size

TINY = TINY_TEXT | {
    "head_dim": 32,
    "rope_parameters": TINY_ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5},
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
TINY_VISION = TINY_TOWER | {"num_position_embeddings": 256}
ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000.0,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
TEXT = {"head_dim": 256, "num_attention_heads": 16, "vocab_size": 248320, "rope_parameters": ROPE}
TEXT_9B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4}
TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
VLLM_LORA = (
    "https://github.com/vllm-project/vllm/blob/00def4f8421153e037ff6270c0a8c31912a00206"
    "/vllm/model_executor/models/qwen3_5.py"
)
QWEN3_5 = Family(
    "qwen3_5",
    "Qwen3.5",
    tower_class="Qwen3_5VisionModel",
    sizes={"tiny": Size(TINY, TINY_VISION), "9b": Size(TEXT | TEXT_9B, TOWER)},
    layer_types=frozenset({"full_attention", "linear_attention"}),
    vllm_lora=VLLM_LORA,
)
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
        "tiny": Size(TINY | TINY_EXPERTS | {"shared_expert_intermediate_size": 48}, TINY_VISION),
        "35b-a3b": Size(TEXT | EXPERTS | TEXT_35B, TOWER),
    },
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
