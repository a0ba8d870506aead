"""Qwen3-VL (https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct): DeepStack, full attention in all decoder layers.

Its mixture of experts (https://huggingface.co/Qwen/Qwen3-VL-30B-A3B-Instruct) has the same tower. The experts of a
token depend on that token alone, so packs and rows choose the same ones.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.families.family import TINY_EXPERTS, TINY_ROPE, TINY_TEXT, TINY_TOWER, VLLM_LORA, Family, Size

TINY = TINY_TEXT | {"head_dim": 16, "rope_parameters": TINY_ROPE | {"mrope_interleaved": True}}
TINY_VISION = TINY_TOWER | {"deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 256}
ROPE = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
TEXT = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "rope_parameters": ROPE}
SMALL_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "deepstack_visual_indexes": [5, 11, 17],
}
TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}
QWEN3_VL = Family(
    "qwen3_vl",
    "Qwen3-VL",
    tower_class="Qwen3VLVisionModel",
    sizes={
        "tiny": Size(TINY, TINY_VISION),
        "2b": Size(
            TEXT | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
            SMALL_TOWER,
            tied=True,
        ),
        "4b": Size(
            TEXT | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
            SMALL_TOWER,
            tied=True,
        ),
        "8b": Size(
            TEXT
            | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
            TOWER,
        ),
    },
    has_deepstack=True,
    has_short_last_layer=True,
    vllm_lora=VLLM_LORA,
)
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
TEXT_30B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3_VL_MOE = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    name="Qwen3-VL-MoE",
    tower_class="Qwen3VLMoeVisionModel",
    sizes={
        "tiny": Size(TINY | TINY_EXPERTS, TINY_VISION),
        "30b-a3b": Size(TEXT | EXPERTS | TEXT_30B | {"num_key_value_heads": 4}, TOWER),
    },
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
