"""Keys and values of many conversations in one flat buffer, in the form of transformers' caches.

Design: every layer gives its keys and values to `update` and attends to what that returns
(https://huggingface.co/docs/transformers/cache_explanation), so the model's code is used unchanged. Each token has a
place in the buffer. A pack of prompts is written to its places and attends to itself alone, as in training. One token
of each growing answer is written to its place and attends to the whole buffer, where the mask leaves it the tokens of
its own prompt and answer. Unlike transformers' caches it has no rows, so the tokens of an image are there once,
however many answers attend to them. The cost is that a mask over all places decides what belongs together.
"""

from __future__ import annotations

from typing import Any

import torch


class KeyValues:
    """The buffer of each layer; it is allocated when the first pass writes to it."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.places: torch.Tensor
        """Where the next pass writes its tokens, `[L]`."""
        self.is_whole = False
        """Whether the next pass attends to the whole buffer, and not only to its own tokens."""
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values `[1, heads, L, size]`; returns those that the pass attends to."""
        if layer not in self._keys:
            for buffers, tensor in ((self._keys, keys), (self._values, values)):
                buffers[layer] = tensor.new_zeros(*tensor.shape[:2], self.num_places, tensor.shape[3])
        self._keys[layer].index_copy_(2, self.places, keys)
        self._values[layer].index_copy_(2, self.places, values)
        return (self._keys[layer], self._values[layer]) if self.is_whole else (keys, values)

    def get_seq_length(self, layer: int = 0) -> int:
        """For transformers, which asks where positions begin; all passes give their positions themselves."""
        return 0


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers, for transformers' `config` of a language model."""
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim) * dtype.itemsize
