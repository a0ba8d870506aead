"""Qwen3-VL (https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct): DeepStack, full attention in all decoder layers."""

from __future__ import annotations

from lookonce.families.family import TINY_TEXT, VLLM_LORA, Family, Size

TINY_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
TINY = Size(
    TINY_TEXT | {"head_dim": 16, "rope_parameters": TINY_ROPE},
    {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "deepstack_visual_indexes": [0, 1, 2],
        "num_position_embeddings": 256,
    },
)
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
        "tiny": TINY,
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
