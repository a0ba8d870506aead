"""Frozen weights in 8 or 4 bits: bitsandbytes' layers, which transformers' quantiser puts in place as it loads a model.

Design: this is stock QLoRA, so that an adapter means the same elsewhere: the same `BitsAndBytesConfig` gives the same
weights in any program. Only the products of the decoder layers are quantised. The embeddings, `lm_head`, the norms and
the tower, whose features are in the cache, keep their precision. A model is loaded on the device where it will run, one
tensor after another, so a GPU never holds all weights as they are in the files.

nf4 (https://arxiv.org/abs/2305.14314) rounds weights alone. int8 rounds the inputs of each product too, each token's by
its own largest value, so a token's result does not depend on the tokens beside it. bitsandbytes' usual threshold, above
which inputs are not rounded, is off: it looks for large values among all tokens together. What int8 costs: rounding
magnifies differences. Two computations that differ in the last bit, as packs and rows do, may round an input to
neighbouring values. (In training on a CPU, bitsandbytes does not round inputs.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import BitsAndBytesConfig

from lookonce.families.lookup import FAMILIES

NOT_QUANTISED = ("lm_head", *{f"model.{family.tower}" for family in FAMILIES.values()})
"""Modules that keep their precision: the last product, and the tower, in models that have it."""
logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it notes each cast of int8's inputs


class BitsAndBytes:
    """Frozen weights in int8 or nf4."""

    def __init__(self, frozen: str) -> None:
        self._frozen = frozen

    def loading_options(self, dtype: torch.dtype) -> dict[str, Any]:
        options: dict[str, dict[str, Any]] = {
            "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
            "nf4": {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_compute_dtype": dtype,
            },
        }
        config: Any = BitsAndBytesConfig
        return {"quantization_config": config(llm_int8_skip_modules=[*NOT_QUANTISED], **options[self._frozen])}

    def finish(self, model: Any) -> None:
        for module in model.modules():
            if isinstance(module, Linear4bit):
                # On some CPUs an evaluation would round the scales again, in place, and training would use these.
                module.support_avx512bf16_for_cpu = False
            elif isinstance(module, Linear8bitLt):
                module.init_8bit_state()  # else in the first forward pass, and layers would be compiled twice

    def mismatched(self, model: Any) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
        for name, module in model.named_modules():
            if isinstance(module, (Linear4bit, Linear8bitLt)):
                weight, shape = module.weight, (module.out_features, module.in_features)
                found = weight.quant_state.shape if isinstance(module, Linear4bit) else weight.shape
                if tuple(found) != shape:
                    yield f"{name}.weight", found, shape
