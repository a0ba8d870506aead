"""Attention over packs beside a float64 reference; masks and block lists beside the definition of a pack.

Design: the definition, `allowed`, follows from rows and not from the code that training uses. Each question is a row,
its prefix and then its branch, and a row is causal. What rows share is written once, and no row knows of another. The
reference is PyTorch's own attention with that mask, in float64. FlexAttention is compared in its output and in the
gradients of its inputs, which are computed from different block lists: those of the rows for output and queries, those
of the columns for keys and values. The spread is the distance from the reference of the same attention in the precision
that is checked, which has two implementations. Masks and lists are integers and compared exactly, also without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention

from lookonce.selftest.report import Check, within_spread
from lookonce.train.data.packing import BLOCK, Pack
from lookonce.train.model.attention import PackMask, shared_prefix_attention
from lookonce.train.model.compile import for_all_lengths


class PackToMask(NamedTuple):
    """A pack of `L` tokens, padding included."""

    seen_until: torch.Tensor
    """`[L]`, as training has it."""
    allowed: torch.Tensor
    """`[L, L]`, by definition: true where the row's token attends to the column's."""


def allowed(pack: Pack, length: int, device: torch.device) -> torch.Tensor:
    """The definition: `[length, length]`, true where the row's token attends to the column's."""
    allowed, rows, end = torch.zeros(length, length, dtype=torch.bool, device=device), [], 0
    for group in pack.groups:
        row = [*range(end, end + group.num_prefix_tokens)]
        end += group.num_prefix_tokens
        for branch, shared in zip_longest(group.branch_tokens, group.shared_tokens, fillvalue=0):
            row = row[: group.num_prefix_tokens + shared] + [*range(end, end + branch - shared)]
            end += branch - shared
            rows.append(row)
    for row in (*rows, [*range(end, length)]):
        indices = torch.tensor(row, dtype=torch.long, device=device)
        allowed[indices[:, None], indices] = torch.ones(len(row), len(row), dtype=torch.bool, device=device).tril()
    return allowed


class Heads(NamedTuple):
    """The heads of an attention layer."""

    num_queries: int
    num_keys: int
    size: int


Attend = Callable[..., torch.Tensor]
"""Makes the output `[1, L, heads, size]` of queries, keys and values `[1, heads, L, size]`."""
RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")


def attention_checks(packs: Sequence[PackToMask], heads: Heads, dtype: torch.dtype, name: str) -> list[Check]:
    """Compare the attention of packs one after another, as in training."""
    device, repeats = packs[0].allowed.device, heads.num_queries // heads.num_keys
    mask, generator = PackMask(max(len(pack.allowed) for pack in packs), device), torch.Generator().manual_seed(0)
    layer = SimpleNamespace(num_key_value_groups=repeats, is_causal=True)
    distances: list[list[float]] = []
    spread: list[list[float]] = []
    for pack in packs:
        tensors = [
            torch.randn(1, num, len(pack.allowed), heads.size, generator=generator).to(device, dtype)
            for num in (heads.num_queries, heads.num_keys, heads.num_keys, heads.num_queries)
        ]

        def stock(query: torch.Tensor, *others: torch.Tensor, allowed: torch.Tensor = pack.allowed) -> torch.Tensor:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in others)
            return scaled_dot_product_attention(query, key, value, allowed[None, None]).transpose(1, 2)

        def packed(query: Any, key: Any, value: Any, seen_until: torch.Tensor = pack.seen_until) -> torch.Tensor:
            return shared_prefix_attention(layer, query, key, value, mask(seen_until), scaling=heads.size**-0.5)[0]

        exact = _results(stock, [tensor.double() for tensor in tensors])
        with for_all_lengths():
            distances.append(_distances(_results(packed, tensors), exact))
        spread.append(_distances(_results(stock, tensors), exact))
        with sdpa_kernel(SDPBackend.MATH):
            spread.append(_distances(_results(stock, tensors), exact))
    what = (f"attention, {name}: {result}" for result in RESULTS)
    return [
        within_spread(*row) for row in zip(what, zip(*distances, strict=True), zip(*spread, strict=True), strict=True)
    ]


def _results(attend: Attend, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The output for queries, keys and values, and their gradients along the last of `tensors`."""
    *inputs, direction = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, direction.transpose(1, 2))]


def _distances(results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[float]:
    """The largest differences, relative to the largest values."""
    return [
        float((result - reference).abs().max() / reference.abs().max())
        for result, reference in zip(results, exact, strict=True)
    ]


def mask_checks(packs: Sequence[PackToMask]) -> list[Check]:
    """Compare the mask function and both block lists of packs with the definition, one pack after another."""
    mask = PackMask(max(len(pack.allowed) for pack in packs), packs[0].allowed.device)
    wrong = {"mask function": 0, "block lists by row": 0, "block lists by column": 0}
    for seen_until, allowed in packs:
        blocks, length = mask.blocks(seen_until), len(allowed)
        function = create_mask(blocks.mask_mod, None, None, length, length, str(allowed.device))[0, 0]
        in_blocks = allowed.view(length // BLOCK, BLOCK, -1, BLOCK).transpose(1, 2).flatten(2)
        expected = in_blocks.any(-1).int() + in_blocks.all(-1).int()  # 0 if no pair attends, 2 if all do
        wrong["mask function"] += int((function != allowed).sum())
        wrong["block lists by row"] += _num_wrong(blocks, "kv", expected)
        wrong["block lists by column"] += _num_wrong(blocks, "q", expected.T)
    return [Check(f"{name}: wrong entries", number, 0) for name, number in wrong.items()]


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
