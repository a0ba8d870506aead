"""Keys and values of many conversations in one flat buffer for each layer.

Design: each token has a place in the buffer, and attention writes the keys and values of a pass to their places. Unlike
transformers' caches (https://huggingface.co/docs/transformers/cache_explanation) it has no rows, so the tokens of an
image are there once, however many answers attend to them. While passes run, the buffers are attributes of the layers'
attention modules: a cache that is asked by a layer's number would be compiled again for each layer. The cost is that a
mask over all places decides what belongs together.

Layers of linear attention have states instead (states.py), which are attached with the buffers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch

from lookonce.eval.decoding.passes.states import States
from lookonce.train.model.linear_attention import FULL
from lookonce.train.model.load import head_size, text_model


class KeyValues:
    """The buffers of a model's layers of full attention, `[1, heads, num_places, size]` each, and states of others."""

    def __init__(self, model: Any, num_places: int, dtype: torch.dtype, states: States) -> None:
        """Allocate the buffers. `dtype` is that of the passes."""
        self.num_places, self.states = num_places, states
        config = text_model(model).config
        shape = (1, config.num_key_value_heads, num_places, head_size(config))
        self._modules = [layer.self_attn for layer in text_model(model).layers if hasattr(layer, "self_attn")]
        self._buffers = [
            tuple(torch.zeros(shape, dtype=dtype, device=model.device) for _ in range(2)) for _ in self._modules
        ]

    def has_room(self, num_places: int, num_states: int) -> bool:
        """Whether there are as many places and rows of states."""
        return num_places <= self.num_places and self.states.has_room(num_states)

    def load(self, other: KeyValues) -> None:
        """Copy keys and values of a buffer that has no more places into the first ones."""
        for mine, others in zip(self._buffers, other._buffers, strict=True):
            for buffer, values in zip(mine, others, strict=True):
                buffer[:, :, : other.num_places].copy_(values)

    def with_states(self, states: States) -> KeyValues:
        """The same buffers beside other states."""
        other = copy.copy(self)
        other.states = states
        return other

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Give each layer its buffers or its states."""
        for module, (keys, values) in zip(self._modules, self._buffers, strict=True):
            module.kept_keys, module.kept_values = keys, values
        try:
            with self.states.attached():
                yield
        finally:
            for module in self._modules:
                del module.kept_keys, module.kept_values


def keep(module: Any, key: torch.Tensor, value: torch.Tensor, places: torch.Tensor) -> None:
    """Write the keys and values `[1, heads, L, size]` of a pass to their places `[L]`.

    With trained embeddings in float32 they may have more precision than the buffers. Attention under autocast has not.
    """
    module.kept_keys.index_copy_(2, places, key.to(module.kept_keys.dtype))
    module.kept_values.index_copy_(2, places, value.to(module.kept_values.dtype))


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers, for transformers' `config` of a language model."""
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return 2 * int([*kinds].count(FULL) * config.num_key_value_heads * head_size(config)) * dtype.itemsize
