"""Layers of linear attention over packs: each branch begins with the state that its prefix left.

A mask has no effect in such a layer. What a token depends on runs over the sequence as a state: the sums of the gated
delta rule (https://arxiv.org/abs/2412.06464), and the last inputs of a causal convolution before it.

Design: such a layer takes `Sequences` for its mask. These know which tokens continue which, and let a state run over
them by transformers' own convolution and rule. Projections, gates and norm know one token only and are computed for the
whole pass. The order of these steps is that of the stock forward method; nothing else is copied. In a pack, the
segments of one depth (segments.py) are the rows of one call, which begins with the final states of the depth before. So
a state is computed once and handed to all of its branches, and autograd adds up the gradients of these. Rows are as
long as the longest of their depth. Padding behind a segment changes no state, as it has a decay of 1 and writes
nothing.

These layers are left out of compiled code, and in training their passes are not captured as CUDA graphs, because each
pack has other shapes.

Shapes: `L` tokens of the pass with padding, `N` sequences of one call, `B` tokens before, `C` channels.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import embedding, pad, softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lookonce.families.kernels import CHUNKED, CONVOLUTION, RECURRENT, computed_by_pytorch
from lookonce.families.lookup import family_of
from lookonce.train.model.load import text_model
from lookonce.train.model.segments import Segments, segments_of

FULL, LINEAR = "full_attention", "linear_attention"
"""transformers' names of these kinds of decoder layers."""


@contextlib.contextmanager
def states_of_branches(model: Any) -> Iterator[None]:
    """Let the layers of linear attention take `Sequences` for a mask within the block.

    Raises:
        ModelError: the installed transformers computes them in another way.
    """
    layers = [layer for layer in linear_layers(text_model(model)) if "forward" not in vars(layer)]
    uncompiled: Any = torch.compiler.disable
    if layers:
        load = family_of(model.config).load
        kernels = Kernels(load(CONVOLUTION), load(CHUNKED), load(RECURRENT))
    for layer in layers:
        layer.forward = partial(uncompiled(_forward), layer, kernels)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def masks_of(model: Any, mask: Any, seen_until: torch.Tensor) -> Any:
    """The model's `attention_mask` for a pack: its `mask`, and its segments where there are layers that need them."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return masks_with(inner, mask, lambda: InPack.of(inner, seen_until))


def masks_with(model: Any, mask: Any, make: Callable[[], Sequences]) -> Any:
    """The model's `attention_mask` of a pass: its `mask`, and its sequences where there are layers that need them."""
    return {FULL: mask, LINEAR: make()} if linear_layers(text_model(model)) else mask


def linear_layers(text: Any) -> list[Any]:
    """The modules of linear attention of a language model."""
    return [layer.linear_attn for layer in text.layers if hasattr(layer, "linear_attn")]


def num_before(layer: Any) -> int:
    """`B`: the inputs before a token that the convolution of a layer reads."""
    return int(layer.conv1d.kernel_size[0]) - 1


@dataclass(frozen=True)
class Columns:
    """What a layer makes of each token by itself, `[L + 1, C]` each; the last row is zeros, for no token."""

    mixed: torch.Tensor
    """Queries, keys and values in one."""
    decay: torch.Tensor
    beta: torch.Tensor

    def rows(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """The columns of some tokens, `[N, tokens, C]` each."""
        for column in (self.mixed, self.decay, self.beta):
            yield embedding(tokens, column, padding_idx=len(column) - 1)


@dataclass(frozen=True)
class Kernels:
    """transformers' functions for what runs over a sequence: the convolution, and two ways to compute the rule.

    They are kernels of flash-linear-attention where that is installed (families/kernels.py), whose arguments are the
    same: decay and states in float32, any number of tokens, heads of at most 256. Gradients run through its states too.
    Its `cu_seqlens`, sequences of any lengths in one row, would spare padding, but PyTorch's functions cannot take it.
    These would keep most of a layer's activations for the backward pass, so in training they are computed again in it.
    """

    convolve: Callable[..., torch.Tensor]
    in_chunks: Callable[..., tuple[torch.Tensor, Any]]
    by_token: Callable[..., tuple[torch.Tensor, Any]]
    """Without gradients."""

    def run(
        self, layer: Any, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: Any, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        """What each token reads, `[N, tokens, heads, size]`, and the final states `[N, heads, size, size]` or None.

        `mixed` `[N, B + tokens, C]` has the tokens before too, `decay` and `beta` `[N, tokens, heads]` have not. It
        begins with `states`, which may be None.
        """
        if torch.is_grad_enabled() and computed_by_pytorch(self.in_chunks, mixed):
            run = partial(self._run, layer, **options)
            found: tuple[torch.Tensor, Any] = checkpoint(
                run, mixed, decay, beta, states, use_reentrant=False, preserve_rng_state=False
            )
            return found
        return self._run(layer, mixed, decay, beta, states, **options)

    def _run(
        self,
        layer: Any,
        mixed: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: Any,
        *,
        by_token: bool = False,
        returns_states: bool = True,
    ) -> tuple[torch.Tensor, Any]:
        weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
        convolved: Any = self.convolve(mixed.transpose(1, 2), weight, bias, activation=layer.activation).transpose(1, 2)
        sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
        query, key, value = convolved[:, num_before(layer) :].split(sizes, dim=-1)
        heads_of_key = layer.num_v_heads // layer.num_k_heads  # older versions repeat keys here, newer ones in the rule
        read = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in (query, key))
        rule = self.by_token if by_token else self.in_chunks
        return rule(
            *(part.repeat_interleave(heads_of_key, dim=2) for part in read),
            value.unflatten(-1, (-1, layer.head_v_dim)),
            g=decay,
            beta=beta,
            initial_state=states,
            output_final_state=returns_states,
            use_qk_l2norm_in_kernel=True,
        )


class Sequences(ABC):
    """Which tokens of a pass continue which."""

    @abstractmethod
    def results(self, layer: Any, kernels: Kernels, columns: Columns) -> torch.Tensor:
        """What each token reads from the state of its sequence, `[L, heads, size]`."""


@dataclass(frozen=True)
class InPack(Sequences):
    """The segments of a pack, of which those of the first depth begin without a state."""

    segments: Segments

    @classmethod
    def of(cls, model: Any, seen_until: torch.Tensor) -> InPack:
        """Those of a pack, for a model with layers of linear attention."""
        return cls(segments_of(seen_until, num_before(linear_layers(text_model(model))[0])))

    def results(self, layer: Any, kernels: Kernels, columns: Columns) -> torch.Tensor:
        return self.results_and_states(layer, kernels, columns, of_last_depth=False)[0]

    def results_and_states(
        self, layer: Any, kernels: Kernels, columns: Columns, *, of_last_depth: bool = True
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The results, and the final states of the segments of each depth, `[N, heads, size, size]`.

        Nothing in a pack continues those of the last depth, which are the most, so training goes without them.
        """
        results: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        begin, last = num_before(layer), self.segments.depths[-1]
        for rows in self.segments.depths:
            mixed, decay, beta = columns.rows(rows.tokens)
            before = states[-1][rows.parents] if states else None
            wanted = of_last_depth or rows is not last
            result, final = kernels.run(layer, mixed, decay[:, begin:], beta[:, begin:], before, returns_states=wanted)
            results.append(result.flatten(0, 1))
            states += [final] if wanted else []
        return torch.cat(results)[self.segments.places], states


def _forward(
    layer: Any, kernels: Kernels, hidden_states: torch.Tensor, attention_mask: Any = None, **options: Any
) -> torch.Tensor:
    """As the layer's stock forward method; over a pass whose mask is `Sequences`. `hidden_states` `[1, L, H]`."""
    if not isinstance(attention_mask, Sequences):
        stock = type(layer).forward
        return stock(layer, hidden_states, attention_mask=attention_mask, **options)  # type: ignore[no-any-return]
    mixed, gate, step, beta = (
        project(hidden_states)[0] for project in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_a, layer.in_proj_b)
    )
    decay = -layer.A_log.float().exp() * softplus(step.float() + layer.dt_bias)
    columns = Columns(*(pad(column, (0, 0, 0, 1)) for column in (mixed, decay, beta.sigmoid())))
    results = attention_mask.results(layer, kernels, columns)
    normed = layer.norm(results.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    projected: torch.Tensor = layer.out_proj(normed.view(1, len(gate), -1))
    return projected
