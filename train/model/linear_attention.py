"""Layers of linear attention over packs: each branch begins with the state that its prefix left.

A mask has no effect in such a layer. What a token depends on runs over the sequence as a state: the sums of the gated
delta rule (https://arxiv.org/abs/2412.06464), and the last inputs of a causal convolution before it.

Design: the segments of one depth (segments.py) are the rows of one call of transformers' own convolution and of one of
its rule, which begins with the final states of the depth before. So a state is computed once and handed to all of its
branches, and autograd adds up the gradients of these. Projections, gates and norm know one token only
and are computed for the whole pack. The order of these steps is that of the stock forward method; nothing else is
copied. Rows are as long as the longest of their depth. Padding behind a segment changes no state, as it has a decay of
1 and writes nothing.

These layers are left out of compiled code, and their passes are not captured as CUDA graphs, because each pack has
other shapes.

Shapes: `L` tokens of the pack with padding, `N` segments of a depth, `C` channels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding, pad, softplus
from torch.nn.parallel import DistributedDataParallel

from lookonce.families.lookup import family_of
from lookonce.train.model.load import text_model
from lookonce.train.model.segments import Rows, Segments, segments_of

FULL, LINEAR = "full_attention", "linear_attention"
"""transformers' names of these kinds of decoder layers."""


@contextlib.contextmanager
def states_of_branches(model: Any) -> Iterator[None]:
    """Let the layers of linear attention take `Segments` for a mask within the block.

    Raises:
        ModelError: the installed transformers computes them in another way.
    """
    layers = [layer for layer in linear_layers(text_model(model)) if "forward" not in vars(layer)]
    uncompiled: Any = torch.compiler.disable
    if layers:
        family: Any = family_of(model.config)
        steps = _Steps(family.load("causal_conv1d_fn"), family.load("torch_chunk_gated_delta_rule"))
    for layer in layers:
        layer.forward = partial(uncompiled(_forward), layer, steps)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def masks_of(model: Any, mask: Any, seen_until: torch.Tensor) -> Any:
    """The model's `attention_mask` for a pack: its `mask`, and its segments where there are layers that need them."""
    layers = linear_layers(text_model(model.module if isinstance(model, DistributedDataParallel) else model))
    if not layers:
        return mask
    return {FULL: mask, LINEAR: segments_of(seen_until, layers[0].conv1d.kernel_size[0] - 1)}


def linear_layers(text: Any) -> list[Any]:
    """The modules of linear attention of a language model."""
    return [layer.linear_attn for layer in text.layers if hasattr(layer, "linear_attn")]


@dataclass(frozen=True)
class _Steps:
    """transformers' functions for what runs over a sequence."""

    convolve: Callable[..., torch.Tensor]
    delta_rule: Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Columns:
    """What a layer makes of each token by itself, `[L + 1, C]` each; the last row is zeros, for no token."""

    mixed: torch.Tensor
    """Queries, keys and values in one."""
    decay: torch.Tensor
    beta: torch.Tensor

    def rows(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """The columns of some tokens, `[N, tokens, C]` each."""
        for column in (self.mixed, self.decay, self.beta):
            yield embedding(tokens, column, padding_idx=len(column) - 1)


def _forward(
    layer: Any, steps: _Steps, hidden_states: torch.Tensor, attention_mask: Any = None, **options: Any
) -> torch.Tensor:
    """As the layer's stock forward method; over a pack if the mask is `Segments`. `hidden_states` `[1, L, H]`."""
    if not isinstance(attention_mask, Segments):
        stock = type(layer).forward
        return stock(layer, hidden_states, attention_mask=attention_mask, **options)  # type: ignore[no-any-return]
    mixed, gate, step, beta = (
        project(hidden_states)[0] for project in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_a, layer.in_proj_b)
    )
    decay = -layer.A_log.float().exp() * softplus(step.float() + layer.dt_bias)
    columns = _Columns(*(pad(column, (0, 0, 0, 1)) for column in (mixed, decay, beta.sigmoid())))
    results, states = [], None
    for rows in attention_mask.depths:
        result, states = _of_depth(layer, steps, columns, rows, states)
        results.append(result.flatten(0, 1))
    ordered = torch.cat(results)[attention_mask.places]
    normed = layer.norm(ordered.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    projected: torch.Tensor = layer.out_proj(normed.view(1, len(gate), -1))
    return projected


def _of_depth(
    layer: Any, steps: _Steps, columns: _Columns, rows: Rows, states: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the segments of a depth, `[N, longest, heads, size]`, and their final states.

    `states` are the final ones of the depth before.
    """
    num_before = layer.conv1d.kernel_size[0] - 1
    mixed, decay, beta = columns.rows(rows.tokens)
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    convolved: Any = steps.convolve(mixed.transpose(1, 2), weight, bias, activation=layer.activation).transpose(1, 2)
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    query, key, value = convolved[:, num_before:].split(sizes, dim=-1)
    heads_of_key = layer.num_v_heads // layer.num_k_heads  # older versions repeat keys here, newer ones in the rule
    return steps.delta_rule(
        *(part.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(heads_of_key, dim=2) for part in (query, key)),
        value.unflatten(-1, (-1, layer.head_v_dim)),
        g=decay[:, num_before:],
        beta=beta[:, num_before:],
        initial_state=None if states is None else states[rows.parents],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
