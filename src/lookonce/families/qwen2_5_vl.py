"""Qwen2.5-VL (https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct): windows in the tower, no DeepStack.

Qwen2-VL (https://huggingface.co/Qwen/Qwen2-VL-7B-Instruct) has the same language model with an older tower, which has
no windows, and whose configuration names the size of its output `hidden_size`.
"""

from __future__ import annotations

from lookonce.families.family import TINY_ROPE, TINY_TEXT, TINY_TOWER, VLLM_LORA, Family, Size

TINY = TINY_TEXT | {
    "rope_parameters": TINY_ROPE,
    "bos_token_id": None,  # transformers' class has those of the published tokenizer; the sample puts its own here
    "eos_token_id": None,
}
TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]},
}
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
QWEN2_5_VL = Family(
    "qwen2_5_vl",
    "Qwen2.5-VL",
    tower_class="Qwen2_5_VisionTransformerPretrainedModel",
    sizes={
        "tiny": Size(TINY, TINY_TOWER | {"fullatt_block_indexes": [1, 3], "window_size": 56}),
        "7b": Size(TEXT, TOWER),
    },
    has_short_last_layer=True,
    vllm_lora=VLLM_LORA,
)
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
