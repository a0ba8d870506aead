"""LoRA's products, in the order that reads and writes least.

Design: a GPU spends more time on reading and writing what LoRA adds to a layer's output than on LoRA's small products.
So on a GPU each frozen weight and its LoRA matrices become one matrix (`joined`), where they can; elsewhere, and with
quantised or sharded weights or dropout, LoRA's scale is part of its matrix B (`scaled`). Only PEFT's forward method is
replaced, and only within the block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

from peft.tuners.lora.layer import Linear

from lookonce.train.model.load import text_model
from lookonce.train.model.lora.scaled import scaled_forward


@contextlib.contextmanager
def fewer_passes(model: Any, *, joins: bool) -> Iterator[None]:
    """Compute the LoRA layers of a model with fewer passes through memory within the block.

    If it `joins`, frozen weights become parts of joined matrices where they can.
    """
    layers: list[Any] = [one for one in model.modules() if type(one) is Linear and "forward" not in vars(one)]
    for layer in layers:
        layer.forward = MethodType(scaled_forward, layer)
    try:
        with _joined(model, layers) if joins else contextlib.nullcontext():
            yield
    finally:
        for layer in layers:
            del layer.forward


def _joined(model: Any, layers: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    from lookonce.train.model.lora.joined import joined_layers  # here, as it looks for Triton

    return joined_layers(text_model(model), layers)
