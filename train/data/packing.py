"""Packing: an optimizer step's groups as packs, training sequences that fit the GPU, distributed over the ranks.

Design: use as few packs as possible, all of about the same length, because the longest pack determines the memory that
is needed and how long ranks wait for each other. Groups are taken longest first, and each goes into the least filled
pack (Graham's LPT rule, https://doi.org/10.1137/0117039). If a pack becomes too long, packing starts again with more
packs. The packs of large steps are more than nine tenths full. The cost of this simple rule is one pack too many in
some steps, with all packs a little shorter.

Every rank gets the same number of packs. A group is split, and its prefix repeated, if it is longer than a pack or if
there are fewer groups than packs. If nothing is left to split, a rank repeats a pack with target weights of 0, because
the other ranks would otherwise wait for it forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise

from lookonce.train.data.groups import Group

BLOCK = 128
"""Tokens per block of FlexAttention's kernels; on a GPU, packs are padded to whole blocks."""
GROWTH = 0.01
"""Share of packs added per attempt, so that a whole validation split, which is one step, takes few attempts."""


@dataclass(frozen=True)
class Pack:
    """One training sequence: for each group its prefix and then its branches. In `separate` mode, a batch of rows."""

    groups: tuple[Group, ...]
    is_filler: bool = False
    """Whether it repeats another pack, so that all ranks have equally many; its target weights are 0."""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)

    @property
    def num_samples(self) -> int:
        """Number of examples, those of a filler included."""
        return sum(len(group.examples) for group in self.groups)


def pack_step(step: Sequence[Group], tokens_per_pack: int, num_ranks: int = 1) -> list[list[Pack]]:
    """The packs of each rank, longest first. Ranks have equally many packs, at least one, and about as many tokens.

    Raises:
        ValueError: one example is longer than a pack.
    """
    groups = [fitting for group in step for fitting in _split_to_fit(group, tokens_per_pack)]
    num_packs = num_ranks * math.ceil(sum(group.num_tokens for group in groups) / (tokens_per_pack * num_ranks))
    while _most_tokens(packs := _packs(groups, num_packs)) > tokens_per_pack:
        num_packs += num_ranks * math.ceil(num_packs / num_ranks * GROWTH)
    filler = replace(min(packs, key=lambda pack: pack.num_tokens), is_filler=True)
    packs += [filler] * (num_packs - len(packs))
    ranks = _distribute([pack.num_tokens for pack in packs], num_ranks, num_packs // num_ranks)
    return [[packs[index] for index in indices] for indices in ranks]


def _packs(groups: Sequence[Group], num_packs: int) -> list[Pack]:
    """All groups in `num_packs` packs of any length; in fewer packs if the groups cannot be split further."""
    groups = _split_further(groups, num_packs)
    packs = _distribute([group.num_tokens for group in groups], num_packs, len(groups))
    return [Pack(tuple(groups[index] for index in sorted(indices))) for indices in packs if indices]


def _split_to_fit(group: Group, tokens_per_pack: int) -> list[Group]:
    """The group split evenly into as few groups as possible that each fit into a pack."""
    longest = group.num_prefix_tokens + max(group.branch_tokens)
    if longest > tokens_per_pack:
        raise ValueError(f"an example of {longest} tokens does not fit into a pack of {tokens_per_pack} tokens")
    num_groups = math.ceil((group.num_tokens - group.num_prefix_tokens) / (tokens_per_pack - group.num_prefix_tokens))
    while _most_tokens(split := _split_evenly(group, num_groups)) > tokens_per_pack:
        num_groups += 1
    return split


def _split_further(groups: Sequence[Group], num_groups: int) -> list[Group]:
    """The groups split into at least `num_groups`, those with the most branches first; fewer if nothing can be split.

    If a group fits into a pack, so does each group that it is split into.
    """
    splits = [1] * len(groups)
    while sum(splits) < num_groups:
        branches = [len(group.examples) / into for group, into in zip(groups, splits, strict=True)]
        if max(branches) <= 1:
            break
        splits[branches.index(max(branches))] += 1
    return [split for group, into in zip(groups, splits, strict=True) for split in _split_evenly(group, into)]


def _split_evenly(group: Group, num_groups: int) -> list[Group]:
    if num_groups == 1:  # nearly always
        return [group]
    members = _distribute(group.branch_tokens, num_groups, len(group.examples))
    return [group.subset(sorted(some)) for some in members]


def _most_tokens(sequences: Iterable[Group | Pack]) -> int:
    return max(sequence.num_tokens for sequence in sequences)


def _distribute(sizes: Sequence[int], num_bins: int, max_each: int) -> list[list[int]]:
    """The indices of `sizes` in bins: largest first, each into the least filled bin with fewer than `max_each`."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        filled, number = heappop(heap)
        bins[number].append(index)
        if len(bins[number]) < max_each:
            heappush(heap, (filled + sizes[index], number))
    return bins


def row_batches(step: Sequence[Group], samples_per_forward: int, num_ranks: int = 1) -> list[list[Pack]]:
    """Groups of one example each as batches of rows of about equal size, in order. Ranks have equally many batches."""
    num_packs = num_ranks * math.ceil(len(step) / (samples_per_forward * num_ranks))
    edges = [len(step) * number // num_packs for number in range(num_packs + 1)]
    packs = [Pack(tuple(step[start:end])) for start, end in pairwise(edges) if end > start]
    packs += [replace(packs[0], is_filler=True)] * (num_packs - len(packs))
    return [packs[rank::num_ranks] for rank in range(num_ranks)]


def padded_length(num_tokens: int) -> int:
    """The length that a pack is padded to, in whole blocks.

    Lengths are one block apart; from 4,096 tokens on they are a 16th to a 32nd of the length apart, so that there are
    only some dozens of them. The shortest is two blocks, because torch.compile specializes on sizes of 1
    (https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html).
    """
    num_blocks = -(-num_tokens // BLOCK)
    spacing = max((1 << num_blocks.bit_length() - 1) // 16, 1)
    return max(-(-num_blocks // spacing) * spacing, 2) * BLOCK
