"""LoRA layers whose scale multiplies the matrix B.

Design: PEFT casts the input of each layer to float32 and multiplies LoRA's output, which is as large as the layer's, by
the scale alpha / rank. Here the scale multiplies B, and autocast casts the two matrices; the result is the same, to the
last bit if the scale is a power of two, as alpha / rank usually is. What PEFT does besides (several adapters, DoRA,
merged weights, quantised layers) is left to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear


def scaled_forward(layer: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As PEFT's forward method."""
    if not is_plain(layer, x) or args or options:
        return type(layer).forward(layer, x, *args, **options)  # type: ignore[no-any-return]
    (name,) = layer.active_adapters
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight * layer.scaling[name]
    result: torch.Tensor = layer.base_layer(x)
    return result + linear(linear(layer.lora_dropout[name](x), a), b)


def is_plain(layer: Any, x: torch.Tensor) -> bool:
    """Whether a layer has one LoRA adapter and nothing else, in a precision that needs no cast of the input."""
    names = layer.active_adapters
    if len(names) != 1 or names[0] not in layer.lora_A or layer.disable_adapters or layer.merged or layer.lora_variant:
        return False
    needs_cast = layer.lora_A[names[0]].weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
    return layer.lora_B[names[0]].bias is None and not needs_cast
