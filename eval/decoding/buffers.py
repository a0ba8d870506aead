"""What passes know of many conversations: keys and values in a buffer for each layer, or states of linear attention.

Each token has a slot in the buffer, to which attention writes its keys and values. Unlike transformers' caches the
buffer has no rows, so the tokens of an image are there once for all answers that attend to them. The price is a mask
over all slots. While passes run, the buffers are attributes of the layers' modules: a cache that is asked by a layer's
number would be compiled again for each layer.

A layer of linear attention keeps a state of fixed size and the last inputs of its convolution
(train/model/linear_attention.py), in a row for each conversation. The pass of the prompts computes the state of a
prefix once for all of its questions. Later passes gather and scatter the rows that they continue by one token.

Shapes: `R` rows, `N` conversations that a pass continues, `L` tokens of the pass, `B` inputs of the convolution before
a token, `C` channels.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lookonce.eval.decoding.batches import PADDING, Branches, state_rows
from lookonce.train.model.linear_attention import (
    FULL,
    LINEAR,
    Columns,
    InPack,
    Kernels,
    Sequences,
    linear_layers,
    num_before,
)
from lookonce.train.model.load import head_size, replaced, text_model

WORKING = 4
"""States of each conversation that the rule has beside the buffers in one layer: as they were, decayed, the change and
the sum."""


@dataclass(frozen=True)
class OfPrompts(Sequences):
    """The segments of a pack of prompts, which leave the states of their conversations."""

    pack: InPack
    last: torch.Tensor
    """The index of each conversation's last token, `[N]`."""
    rows: torch.Tensor
    """The row of each conversation, `[N]`."""

    def results(self, layer: Any, kernels: Kernels, columns: Columns) -> torch.Tensor:
        results, states = self.pack.results_and_states(layer, kernels, columns)
        ended = self.pack.segments.numbers[self.last]
        _keep(layer, self.rows, torch.cat(states)[ended], columns.mixed[self.pack.segments.last[ended]])
        return results


@dataclass(frozen=True)
class Continued(Sequences):
    """Conversations that continue their states by a token each."""

    tokens: torch.Tensor
    """The index of each conversation's token, `[N, 1]`."""
    rows: torch.Tensor
    """The row of each conversation, `[N]`."""

    @classmethod
    def of(cls, branches: Branches) -> Continued:
        """Each branch by its latest token. Branches that have ended write to the padding."""
        order = torch.arange(len(branches.token), device=branches.token.device)
        return cls(order[:, None], torch.where(branches.ended, PADDING, state_rows(branches.examples)))

    def results(self, layer: Any, kernels: Kernels, columns: Columns) -> torch.Tensor:
        inputs, decay, beta = columns.of(self.tokens)
        mixed = torch.cat([layer.kept_inputs[self.rows].to(inputs.dtype), inputs], dim=1)
        result, final = kernels.run(layer, mixed, decay, beta, layer.kept_states[self.rows], by_token=True)
        _keep(layer, self.rows, final, mixed[:, 1:])
        return result.flatten(0, 1)


def bytes_per_state(config: Any, dtype: torch.dtype, num_more: int = 0) -> int:
    """Bytes of a conversation's row in all layers and `num_more`, by transformers' `config`; 0 if there are none."""
    num_layers = [*(getattr(config, "layer_types", None) or ())].count(LINEAR)
    if not num_layers:
        return 0
    keys, values = (getattr(config, f"linear_num_{name}_heads") for name in ("key", "value"))
    sizes = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * keys * sizes[0] + values * sizes[1]
    inputs = (config.linear_conv_kernel_dim - 1) * channels * dtype.itemsize
    return (num_layers + num_more) * int(values * sizes[0] * sizes[1] * torch.float32.itemsize + inputs)


def _keep(layer: Any, rows: torch.Tensor, states: torch.Tensor, inputs: torch.Tensor) -> None:
    """Write the states `[N, heads, size, size]` and last inputs `[N, B, C]` of conversations to their rows `[N]`."""
    layer.kept_states.index_copy_(0, rows, states.to(layer.kept_states.dtype))
    layer.kept_inputs.index_copy_(0, rows, inputs.to(layer.kept_inputs.dtype))


class KeyValues:
    """The buffers of a model's layers: `[1, heads, num_slots, size]` for full attention, else `[num_states, ...]`."""

    def __init__(self, model: Any, num_slots: int, num_states: int, dtype: torch.dtype) -> None:
        """Allocate the buffers. `dtype` is that of the passes; states are float32."""
        text, zeros = text_model(model), partial(torch.zeros, device=model.device)
        self.num_slots, self.num_states = num_slots, num_states
        self.buffers: list[tuple[Any, str, torch.Tensor]] = []
        """Each with its layer, and the name of the layer's attribute that it is while passes run."""
        for attention in (layer.self_attn for layer in text.layers if hasattr(layer, "self_attn")):
            shape = (1, text.config.num_key_value_heads, num_slots, head_size(text.config))
            self.buffers += [(attention, name, zeros(shape, dtype=dtype)) for name in ("kept_keys", "kept_values")]
        self._linear = linear_layers(text)
        for layer in self._linear:
            states = (num_states, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
            inputs = (num_states, num_before(layer), 2 * layer.key_dim + layer.value_dim)
            self.buffers.append((layer, "kept_states", zeros(states, dtype=torch.float32)))
            self.buffers.append((layer, "kept_inputs", zeros(inputs, dtype=dtype)))

    def has_room(self, num_slots: int, num_states: int) -> bool:
        """Whether there are as many slots, and as many rows of states or no need of any."""
        return num_slots <= self.num_slots and (not self._linear or num_states <= self.num_states)

    def attached(self) -> AbstractContextManager[None]:
        """Give each layer its buffers within a block."""
        return replaced(self.buffers)


def keep(module: Any, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Write the keys and values `[1, heads, L, size]` of a pass to their slots `[L]`.

    With trained embeddings in float32 they may have more precision than the buffers. Attention under autocast has not.
    """
    module.kept_keys.index_copy_(2, slots, key.to(module.kept_keys.dtype))
    module.kept_values.index_copy_(2, slots, value.to(module.kept_values.dtype))


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers, for transformers' `config` of a language model."""
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    return 2 * int([*kinds].count(FULL) * config.num_key_value_heads * head_size(config)) * dtype.itemsize
