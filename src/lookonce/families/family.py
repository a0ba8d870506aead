"""The description of a family: all that lookonce has to know of it beyond what transformers' own classes do.

Design: a description is data. transformers' classes are named and not imported, so that commands that import neither
torch nor transformers can read it. What all families have alike is not here: a model in two parts, the tower and
`model.language_model`; a tower that takes patches and `grid_thw`; mRoPE's positions (train/data/batches.py); Qwen2-VL's
image processor (cache/model/pixels.py); and a chat template in the model folder. A family that lacks one of these needs
another field, and code that asks for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.errors import ModelError

VLLM_LORA = "https://github.com/vllm-project/vllm/pull/24727"
"""The change by which vLLM serves LoRA adapters of several families."""
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""The special tokens that the tokenizers of all families have, in the order of their ids."""
CONTROL_TOKENS = (
    *SPECIAL_TOKENS,
    *("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
)
"""The special tokens of any family's tokenizer. In a text they would act as such, whatever the text means by them.
`<think>` and `<tool_call>` are not among them: a model writes these as ordinary text."""
TINY_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY_TOWER = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4}
TINY_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
TINY_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2}
"""What the tiny models of all families have alike."""


@dataclass(frozen=True)
class Size:
    """The configuration of one model of a family, as far as it differs from that of transformers' class."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    tied: bool = False
    """Whether the output layer has the weights of the embeddings."""


@dataclass(frozen=True)
class Family:
    """What differs between families of models."""

    model_type: str
    """transformers' name of the family: `model_type` in config.json."""
    name: str
    """The name under which it is published."""
    tower_class: str
    """The class of its vision tower, in transformers' module of the family."""
    sizes: Mapping[str, Size]
    """The models of which `lookonce sample` writes one with random weights, by name; there is always a tiny one."""
    tower: str = "visual"
    """The name of the tower in `model`, as in `model.visual`."""
    tower_prefixes: tuple[str, ...] = ("model.visual.", "visual.")
    """What the names of the tower's tensors begin with in a model folder: now, and in the first published models."""
    feature_size: str = "out_hidden_size"
    """The key of `vision_config` with the size of the tower's output."""
    has_deepstack: bool = False
    """Whether the tower also returns levels that the first decoder layers add."""
    has_short_last_layer: bool = False
    """Whether the last decoder layer is computed as in train/model/loss.py."""
    experts: tuple[str, ...] = ()
    """The tensors of a decoder layer that hold the matrices of all experts, for `lora.experts`."""
    image_token: str = "<|image_pad|>"
    """The token that stands for an image in a prompt."""
    vllm_lora: str = ""
    """Where it can be read that vLLM serves LoRA adapters of the family; empty if it was found nowhere."""
    layer_types: frozenset[str] = frozenset({"full_attention"})
    """transformers' names of the kinds of decoder layers that keep the branches of a pack apart: by its mask, or in
    linear attention by states (train/model/linear_attention.py)."""

    def num_levels(self, vision_config: Any) -> int:
        """The number of levels of the features: the merged output, and those of DeepStack."""
        return 1 + (len(vision_config.deepstack_visual_indexes) if self.has_deepstack else 0)

    def feature_shape(self, vision_config: Any) -> tuple[int, int]:
        """The shape of a token's features: the number of levels and their size."""
        return self.num_levels(vision_config), int(getattr(vision_config, self.feature_size))

    def load(self, name: str) -> Any:
        """A class or function of transformers' module of the family.

        Raises:
            ModelError: the installed transformers has nothing of that name.
        """
        try:
            modeling = f"transformers.models.{self.model_type}.modeling_{self.model_type}"
            return getattr(importlib.import_module(modeling), name)
        except (ImportError, AttributeError):
            raise self.missing(name) from None

    def missing(self, what: str) -> ModelError:
        """The error that the installed transformers lacks something."""
        version = importlib.metadata.version("transformers")
        return ModelError(
            f"transformers {version} has no {what}, which {self.name} needs; install a newer one: "
            "pip install --upgrade transformers"
        )
