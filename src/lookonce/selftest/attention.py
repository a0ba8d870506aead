"""Attention over packs beside a float64 reference; masks and block lists beside the definition of a pack.

Design: the definition, `Layout.allowed`, follows from rows and not from the code that training uses. Each question is a
row, its prefix and then its branch, and a row is causal. What rows share is written once, and no row knows of another.
The reference is a softmax written out, with that mask. FlexAttention is compared in its output and in the gradients of
its inputs, which are computed from different block lists: those of the rows for output and queries, those of the
columns for keys and values. The spread is the distance from the reference of PyTorch's own attention, which has two
implementations. Masks and lists are integers and compared exactly, also without a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from lookonce.selftest.report import Check, within_spread
from lookonce.train.data.packing import BLOCK, padded_length
from lookonce.train.model.attention import PackMask, shared_prefix_attention
from lookonce.train.model.compile import for_all_lengths


class Lengths(NamedTuple):
    """The lengths of a group."""

    prefix: int
    branches: tuple[int, ...]
    shared: tuple[int, ...] = ()
    """How many tokens each branch shares with the one before it; empty if none shares any."""

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(self.branches) - sum(self.shared)


@dataclass(frozen=True)
class Layout:
    """The lengths of a pack."""

    groups: tuple[Lengths, ...]

    @property
    def length(self) -> int:
        """Tokens of the pack, padded to whole blocks."""
        return padded_length(sum(group.num_tokens for group in self.groups))

    def seen_until(self, device: torch.device) -> torch.Tensor:
        """The index behind the last token that attends to each token, as a batch has it: `[L]`."""
        queries = torch.arange(1, self.length + 1, device=device)[:, None]
        return (self.allowed(device) * queries).amax(dim=0).int()

    def allowed(self, device: torch.device) -> torch.Tensor:
        """`[L, L]`, true where the row's token attends to the column's."""
        allowed = torch.zeros(self.length, self.length, dtype=torch.bool, device=device)
        end = 0
        for prefix, branches, shared_tokens in self.groups:
            row = [*range(end, end + prefix)]
            end += prefix
            for branch, shared in zip_longest(branches, shared_tokens, fillvalue=0):
                row = row[: prefix + shared] + [*range(end, end + branch - shared)]
                end += branch - shared
                _attend(allowed, row)
        _attend(allowed, range(end, self.length))
        return allowed


def _attend(allowed: torch.Tensor, row: Sequence[int]) -> None:
    """Make a row causal, whose tokens have these indices in the pack."""
    indices = torch.tensor(row, dtype=torch.long, device=allowed.device)
    allowed[indices[:, None], indices] = torch.ones(len(row), len(row), dtype=torch.bool, device=allowed.device).tril()


def random_layout(rng: random.Random, max_tokens: int) -> Layout:
    """A pack of random lengths: one image or several, with 1 to 17 questions each, or no image."""
    wanted = rng.randint(1, max_tokens)
    groups: list[Lengths] = []
    while wanted >= 0:
        group = _random_group(rng)
        wanted -= group.num_tokens
        if wanted >= 0 or not groups:
            groups.append(group)
    return Layout(tuple(groups))


def _random_group(rng: random.Random) -> Lengths:
    """The branches of half of the groups share tokens, and each has at least one of its own."""
    branches = tuple(rng.randint(1, 60) for _ in range(rng.randint(1, 17)))
    shared = (0, *(rng.randint(0, min(before, this) - 1) for before, this in pairwise(branches)))
    return Lengths(rng.choice([0, rng.randint(1, 300)]), branches, rng.choice([(), shared]))


Tensors = Sequence[torch.Tensor]
"""Queries, keys and values."""
RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer."""

    num_queries: int
    num_keys: int
    size: int

    @property
    def queries_per_key(self) -> int:
        return self.num_queries // self.num_keys


def attended(mask: Any, tensors: Tensors, direction: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    """The output of the attention of training, and the gradients of its inputs along `direction`."""
    layer = SimpleNamespace(num_key_value_groups=heads.queries_per_key, is_causal=True)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return shared_prefix_attention(layer, query, key, value, mask, scaling=heads.size**-0.5)[0]

    return _with_gradients(attend, tensors, direction)


def pytorchs(allowed: torch.Tensor, tensors: Tensors, direction: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    """What `attended` returns, by PyTorch's own attention with the mask `allowed` `[L, L]`."""

    def attend(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        key, value = (tensor.repeat_interleave(heads.queries_per_key, dim=1) for tensor in others)
        return scaled_dot_product_attention(query, key, value, allowed[None, None]).transpose(1, 2)

    return _with_gradients(attend, tensors, direction)


def reference(allowed: torch.Tensor, tensors: Tensors, direction: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    """What `attended` returns, written out in float64."""

    def attend(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        key, value = (tensor.repeat_interleave(heads.queries_per_key, dim=1) for tensor in others)
        scores = (query @ key.mT * heads.size**-0.5).masked_fill(~allowed, float("-inf"))
        attended: torch.Tensor = scores.softmax(dim=-1) @ value
        return attended.transpose(1, 2)

    return _with_gradients(attend, [tensor.double() for tensor in tensors], direction.double())


def _with_gradients(
    attend: Callable[..., torch.Tensor], tensors: Tensors, direction: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, direction)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def attention_checks(
    layouts: Sequence[Layout], heads: Heads, dtype: torch.dtype, name: str, device: torch.device
) -> list[Check]:
    """Compare packs of these layouts one after another, as in training."""
    mask, generator = PackMask(max(layout.length for layout in layouts), device), torch.Generator().manual_seed(0)
    found: list[list[float]] = [[] for _ in RESULTS]
    spread: list[list[float]] = [[] for _ in RESULTS]
    for layout in layouts:
        tensors, direction = _draw(layout.length, heads, dtype, generator, device)
        allowed = layout.allowed(device)
        expected = reference(allowed, tensors, direction, heads)
        with for_all_lengths():
            computed = attended(mask(layout.seen_until(device)), tensors, direction, heads)
        others = [pytorchs(allowed, tensors, direction, heads)]
        with sdpa_kernel(SDPBackend.MATH):
            others.append(pytorchs(allowed, tensors, direction, heads))
        for number, right in enumerate(expected):
            found[number].append(relative(computed[number], right))
            spread[number] += [relative(one[number], right) for one in others]
    names = [f"attention, {name}: {result}" for result in RESULTS]
    return [within_spread(*one) for one in zip(names, found, spread, strict=True)]


def _draw(
    length: int, heads: Heads, dtype: torch.dtype, generator: torch.Generator, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys and values `[1, heads, length, size]`; the gradient of the output `[1, length, heads, size]`."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    tensors = [draw(1, num, length, heads.size) for num in (heads.num_queries, heads.num_keys, heads.num_keys)]
    return tensors, draw(1, length, heads.num_queries, heads.size)


def mask_checks(layouts: Sequence[Layout], device: torch.device) -> list[Check]:
    """Compare the mask function and both block lists of packs with the definition, one pack after another."""
    mask = PackMask(max(layout.length for layout in layouts), device)
    wrong = {"mask function": 0, "block lists by row": 0, "block lists by column": 0}
    for layout in layouts:
        allowed, blocks = layout.allowed(device), mask.blocks(layout.seen_until(device))
        function = create_mask(blocks.mask_mod, None, None, layout.length, layout.length, str(device))[0, 0]
        expected = _kinds(allowed)
        wrong["mask function"] += int((function != allowed).sum())
        wrong["block lists by row"] += _num_wrong(blocks, "kv", expected)
        wrong["block lists by column"] += _num_wrong(blocks, "q", expected.T)
    return [Check(f"{name}: wrong entries", number, 0) for name, number in wrong.items()]


def _kinds(allowed: torch.Tensor) -> torch.Tensor:
    """For each block 0 if no pair attends, 1 if some do, 2 if all do."""
    num_blocks = len(allowed) // BLOCK
    blocks = allowed.view(num_blocks, BLOCK, num_blocks, BLOCK).transpose(1, 2).flatten(2)
    return blocks.any(dim=-1).int() + blocks.all(dim=-1).int()


def _num_wrong(blocks: BlockMask, side: str, expected: torch.Tensor) -> int:
    """Wrong entries of the lists of one side; kernels read all lists that are not contiguous wrongly."""
    listed = torch.zeros_like(expected)
    for kind, prefix in ((1, side), (2, f"full_{side}")):
        numbers, indices = (getattr(blocks, f"{prefix}_{name}") for name in ("num_blocks", "indices"))
        if not indices.is_contiguous():
            return expected.numel()
        for row, number in enumerate(numbers.flatten().tolist()):
            listed[row, indices[0, 0, row, :number].long()] += kind
    return int((listed != expected).sum())
