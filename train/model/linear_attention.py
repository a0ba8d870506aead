"""Layers of linear attention over packs: each branch begins with the state that its prefix left.

A mask has no effect in such a layer. What a token depends on runs over the sequence as a state: the sums of the gated
delta rule (https://arxiv.org/abs/2412.06464), and the last inputs of a causal convolution before it. So the layer takes
`Sequences` for its mask, which know what continues what and let a state run over them by transformers' own rule. The
order of steps is that of the stock forward method; nothing else is copied but the convolution.

A pack is a tree in depth-first order. It is cut into segments, parts without branches: a segment begins where
`seen_until` changes. A token of a segment continues the one before it, and the first one continues the last token of
another segment, or nothing. A state runs over the segments of one depth in one call, which has their tokens end to end,
and begins with the final states of the depth before. So a pass takes as many calls as there are depths, and each state
is computed once and handed to all of its branches, whose gradients autograd adds up.

Kernels compute chunks of 64 tokens, so a shorter segment would cost a chunk, and a state in memory. What continues it
therefore has its tokens once more instead, and begins where it did; most packs have two depths then. Before each
sequence are some tokens for computations that look back over them, and which change no state. Segments are worked out
on the CPU, some microseconds each; a GPU has to hand over `seen_until`, once a pack.

These layers are left out of compiled code, and in training their passes are not captured as CUDA graphs, because each
pack has other shapes. What is computed of each token before and after the rule is compiled by itself, for all lengths:
else it would keep more in memory than all other layers, in float32.

Shapes: `L` tokens of the pass with padding, `N` sequences of one call or segments of a depth, `B` tokens before, `T`
tokens of a depth's call, `C` channels.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import embedding, pad, softplus
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from lookonce.families.kernels import CHUNKED, RECURRENT, computed_by_pytorch, in_rows
from lookonce.families.lookup import family_of
from lookonce.train.model.load import replaced, text_model, without_ddp

Column = NDArray[np.int64]
SHORT = 60
"""A sequence of at most this many tokens is repeated in front of what continues it. A chunk has 64."""
FULL, LINEAR = "full_attention", "linear_attention"
"""transformers' names of these kinds of decoder layers."""
EPSILON = 1e-6
"""In the norm of queries and keys, as transformers and flash-linear-attention have it."""


@dataclass(frozen=True)
class Depth:
    """The sequences of one call. Each has the tokens of short segments that it continues, and its own.

    Behind it are those that the next one looks back at: there they keep the chunks of all sequences as they would be.
    """

    tokens: torch.Tensor
    """`[B + T]`: the tokens before the first sequence, then those of all; `L` is no token."""
    changing: torch.Tensor
    """`[T]`: those of all, but no token where one is only looked back at."""
    ends: torch.Tensor
    """`[N + 1]`: where each sequence begins among the `T`, and where the last one ends."""
    ends_on_cpu: torch.Tensor
    parents: torch.Tensor
    """`[N]`: the number, in the depth before, of the segment that each continues; 0 if it continues none."""


@dataclass(frozen=True)
class Segments:
    depths: tuple[Depth, ...]
    """First those that continue nothing."""
    places: torch.Tensor
    """`[L]`: where a token's result is if those of all depths are laid end to end."""
    numbers: torch.Tensor
    """`[L]`: the number of a token's segment, counted through all depths."""
    last: torch.Tensor
    """`[segments, B]`: the last tokens of each segment, after those before it; `L` is no token."""


@dataclass(frozen=True)
class _Segment:
    tokens: Column
    """Those of short segments that it continues, and its own."""
    own: Column
    before: Column
    """`[B]`: the tokens before the first one; `L` where there is none."""
    depth: int
    number: int
    """Among those of its depth."""
    parent: int
    """The number of the segment that it continues; 0 for none."""

    @property
    def last(self) -> Column:
        """`[B]`: the last tokens up to its end."""
        return np.concatenate([self.before, self.tokens])[len(self.tokens) :]


def segments_of(seen_until: torch.Tensor, num_before: int, short: int = SHORT) -> Segments:
    """The segments of a pack, with `num_before` tokens before each. `seen_until` is `[L]`."""
    segments = sorted(_cut(seen_until.cpu().numpy(), num_before, short), key=lambda segment: segment.depth)
    depths, begin, device = [], 0, seen_until.device
    places, numbers = (np.empty(len(seen_until), dtype=np.int64) for _ in range(2))
    for number, segment in enumerate(segments):
        numbers[segment.own] = number
    for _, members in groupby(segments, key=lambda segment: segment.depth):
        same = list(members)
        ends = np.cumsum([0, *(len(segment.tokens) + num_before for segment in same)])
        for segment, start in zip(same, ends[:-1], strict=True):
            places[segment.own] = begin + start + len(segment.tokens) - len(segment.own) + np.arange(len(segment.own))
        ends[-1] -= num_before
        depths.append(_depth(same, ends, num_before, len(seen_until), device))
        begin += ends[-1]
    last = np.stack([segment.last for segment in segments])
    return Segments(tuple(depths), *(_on(device, column) for column in (places, numbers, last)))


def _depth(same: list[_Segment], ends: Column, num_before: int, no_token: int, device: torch.device) -> Depth:
    nothing = np.full(num_before, no_token)
    tokens = np.concatenate([part for segment in same for part in (segment.before, segment.tokens)])
    changing = np.concatenate([part for segment in same for part in (nothing, segment.tokens)])[num_before:]
    parents = _on(device, [segment.parent for segment in same])
    return Depth(_on(device, tokens), _on(device, changing), _on(device, ends), torch.as_tensor(ends), parents)


def _cut(seen_until: NDArray[np.int32], num_before: int, short: int) -> Iterator[_Segment]:
    """The segments, in the order of the pack."""
    starts = np.flatnonzero(np.diff(seen_until, prepend=-1))
    path: list[_Segment] = []  # a segment, that which it continues, and so on, from the last
    nothing = np.full(num_before, len(seen_until))
    num_segments: dict[int, int] = {}
    for start, end in zip(starts, [*starts[1:], len(seen_until)], strict=True):
        while path and seen_until[path[-1].own[-1]] <= start:
            path.pop()
        own = tokens = np.arange(start, end)
        depth, parent, before = 0, 0, nothing
        if path and len(path[-1].tokens) <= short:
            tokens = np.concatenate([path[-1].tokens, own])
            depth, parent, before = path[-1].depth, path[-1].parent, path[-1].before
        elif path:
            depth, parent, before = path[-1].depth + 1, path[-1].number, path[-1].last
        number = num_segments[depth] = num_segments.get(depth, -1) + 1
        path.append(_Segment(tokens, own, before, depth, number, parent))
        yield path[-1]


def _on(device: torch.device, numbers: Column | list[int]) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.long).to(device)


@contextlib.contextmanager
def states_of_branches(model: Any, *, compiled: bool = False) -> Iterator[None]:
    """Let the layers of linear attention take `Sequences` for a mask within the block, with `compiled` parts.

    Raises:
        ModelError: the installed transformers computes them in another way.
    """
    layers = [layer for layer in linear_layers(text_model(model)) if "forward" not in vars(layer)]
    uncompiled: Any = torch.compiler.disable
    if layers:
        load = family_of(model.config).load
        parts: list[Any] = [torch.compile(part, dynamic=True) if compiled else part for part in (heads_of, gated)]
        kernels = Kernels(load(CHUNKED), load(RECURRENT), *parts)
    with replaced((layer, "forward", partial(uncompiled(_forward), layer, kernels)) for layer in layers):
        yield


def masks_of(model: Any, mask: Any, seen_until: torch.Tensor) -> Any:
    """The model's `attention_mask` for a pack: its `mask`, and its segments where there are layers that need them."""
    inner = without_ddp(model)
    return masks_with(inner, mask, lambda: InPack.of(inner, seen_until))


def masks_with(model: Any, mask: Any, make: Callable[[], Sequences]) -> Any:
    """The model's `attention_mask` of a pass: its `mask`, and its sequences where there are layers that need them."""
    return {FULL: mask, LINEAR: make()} if linear_layers(text_model(model)) else mask


def linear_layers(text: Any) -> list[Any]:
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

    def of(self, tokens: torch.Tensor, changing: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """The columns of some tokens, of the shape of these with `C` behind it; the last two of `changing` if given."""
        others = tokens if changing is None else changing
        for chosen, column in ((tokens, self.mixed), (others, self.decay), (others, self.beta)):
            yield embedding(chosen, column, padding_idx=len(column) - 1)


def heads_of(layer: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of tokens, `[N, tokens, heads, size]` each; `mixed` is `[N, B + tokens, C]`.

    They come from the convolution over a token and the `B` before it. Queries and keys have a length of 1; the package
    would tune its kernel for that again for each number of tokens.
    """
    exact = torch.promote_types(mixed.dtype, torch.float32)
    weight, num_tokens = layer.conv1d.weight.squeeze(1).to(exact), mixed.shape[1] - num_before(layer)
    sums = sum(mixed[:, at : at + num_tokens].to(exact) * weight[:, at] for at in range(weight.shape[1]))
    if layer.conv1d.bias is not None:
        sums = sums + layer.conv1d.bias.to(exact)
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    *read, value = ACT2FN[layer.activation](sums).split(sizes, dim=-1)
    heads = [part.unflatten(-1, (-1, layer.head_k_dim)) for part in read]
    heads = [part * torch.rsqrt(part.square().sum(-1, keepdim=True) + EPSILON) for part in heads]
    heads_of_key = layer.num_v_heads // layer.num_k_heads  # older versions of the rule do not repeat keys themselves
    query, key = (part.repeat_interleave(heads_of_key, dim=2).to(mixed.dtype) for part in heads)
    return query, key, value.unflatten(-1, (-1, layer.head_v_dim)).to(mixed.dtype)


def gated(layer: Any, results: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """What the norm and the gate make of the results of tokens, `[L, heads, size]`; `gate` is `[L, heads * size]`."""
    normed: torch.Tensor = layer.norm(results.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    return normed.view(1, len(gate), -1)


@dataclass(frozen=True)
class Kernels:
    """What runs over a sequence: transformers' functions for the rule, and what is computed before and after it.

    The rule is a kernel of flash-linear-attention where that is installed (families/kernels.py), whose arguments are
    the same: decay and states in float32, any number of tokens, heads of at most 256. Gradients run through its states
    too. PyTorch's function takes rows of equal length instead of sequences, and would keep most of a layer's
    activations for the backward pass, so in training they are computed again in it.
    """

    in_chunks: Callable[..., tuple[torch.Tensor, Any]]
    by_token: Callable[..., tuple[torch.Tensor, Any]]
    """Without gradients."""
    heads_of: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    gated: Callable[..., torch.Tensor]

    def run(
        self, layer: Any, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, states: Any, **options: Any
    ) -> tuple[torch.Tensor, Any]:
        """What each token reads, `[N, tokens, heads, size]`, and the final states `[N, heads, size, size]` or None.

        `mixed` `[N, B + tokens, C]` has the tokens before too, `decay` and `beta` `[N, tokens, heads]` have not. It
        begins with `states`, which may be None. With a `depth`, its sequences are one row of `mixed`.
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
        depth: Depth | None = None,
        by_token: bool = False,
        returns_states: bool = True,
    ) -> tuple[torch.Tensor, Any]:
        heads = self.heads_of(layer, mixed)
        rule, ends = self.by_token if by_token else self.in_chunks, {}
        if depth is not None:
            rule = in_rows(rule) if computed_by_pytorch(rule, mixed) else rule
            ends = {"cu_seqlens": depth.ends, "cu_seqlens_cpu": depth.ends_on_cpu}
        return rule(*heads, g=decay, beta=beta, initial_state=states, output_final_state=returns_states, **ends)


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
        last = self.segments.depths[-1]
        for depth in self.segments.depths:
            mixed, decay, beta = (column[None] for column in columns.of(depth.tokens, depth.changing))
            before = states[-1][depth.parents] if states else None
            returns_states = of_last_depth or depth is not last
            result, final = kernels.run(layer, mixed, decay, beta, before, depth=depth, returns_states=returns_states)
            results.append(result[0])
            states += [final] if returns_states else []
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
    projected: torch.Tensor = layer.out_proj(kernels.gated(layer, results, gate))
    return projected
