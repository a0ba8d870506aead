"""The groups of an optimizer step as packs: training sequences that fit the GPU, dealt to the ranks.

Design: as few packs as hold the step, all of about the same length, since the longest decides how much memory is
needed and how long the ranks wait for each other. Groups go longest first onto the pack that is least filled (Graham's
LPT rule, https://doi.org/10.1137/0117039); if one finds no room there, it all begins again with more packs. Packs of
large steps are more than nine tenths full; the cost of so simple a rule is a pack too many in some steps, all of them
a little shorter for it.

Each rank gets the same number of packs. A group is cut, its prefix repeated, where it is longer than a pack or where
there are fewer groups than packs to deal; if nothing is left to cut, a rank repeats a pack, which must weigh nothing,
because the others would wait for it forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise

from lookonce.train.data.groups import Group

BLOCK = 128
"""Tokens of a block of FlexAttention's kernels; on a GPU packs are padded to whole blocks."""
MORE = 0.01
"""Of the packs so far, that are tried in addition: so that as many as a whole validation split has are found soon."""


@dataclass(frozen=True)
class Pack:
    """One training sequence."""

    groups: tuple[Group, ...]
    is_filler: bool = False
    """Repeats another pack so that every rank has as many; it must weigh nothing in the loss."""

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)

    @property
    def num_samples(self) -> int:
        """Examples that run, in a filler too."""
        return sum(len(group.examples) for group in self.groups)


def pack_step(step: Sequence[Group], tokens_per_pack: int, num_ranks: int = 1) -> list[list[Pack]]:
    """The packs of each rank, longest first; every rank has as many, at least one, and ranks have about as many tokens.

    Raises:
        ValueError: an example alone is longer than a pack.
    """
    groups = [part for group in step for part in _fitting_parts(group, tokens_per_pack)]
    num_packs = num_ranks * math.ceil(sum(group.num_tokens for group in groups) / (tokens_per_pack * num_ranks))
    while _most_tokens(packs := _packs(groups, num_packs)) > tokens_per_pack:
        num_packs += num_ranks * math.ceil(num_packs / num_ranks * MORE)
    filler = replace(min(packs, key=lambda pack: pack.num_tokens), is_filler=True)
    packs += [filler] * (num_packs - len(packs))
    dealt = _spread([pack.num_tokens for pack in packs], num_ranks, num_packs // num_ranks)
    return [[packs[number] for number in numbers] for numbers in dealt]


def _packs(groups: Sequence[Group], num_packs: int) -> list[Pack]:
    """All groups in that many packs of any length; in fewer, if they can not be cut into as many."""
    parts = _cut_further(groups, num_packs)
    packs = _spread([part.num_tokens for part in parts], num_packs, len(parts))
    return [Pack(tuple(parts[number] for number in sorted(numbers))) for numbers in packs if numbers]


def _fitting_parts(group: Group, tokens_per_pack: int) -> list[Group]:
    """The group in as few even parts as fit into a pack each."""
    longest = group.num_prefix_tokens + max(group.branch_tokens)
    if longest > tokens_per_pack:
        raise ValueError(f"an example of {longest} tokens does not fit into a pack of {tokens_per_pack} tokens")
    num_parts = math.ceil(sum(group.branch_tokens) / (tokens_per_pack - group.num_prefix_tokens))
    while _most_tokens(parts := _even_parts(group, num_parts)) > tokens_per_pack:
        num_parts += 1
    return parts


def _cut_further(groups: Sequence[Group], num_parts: int) -> list[Group]:
    """The groups in at least so many parts, those with the most branches cut first; in fewer if nothing is left to cut.

    A part of what fits into a pack fits.
    """
    cuts = [1] * len(groups)
    while sum(cuts) < num_parts:
        branches = [len(group.examples) / into for group, into in zip(groups, cuts, strict=True)]
        if max(branches) <= 1:
            break
        cuts[branches.index(max(branches))] += 1
    return [part for group, into in zip(groups, cuts, strict=True) for part in _even_parts(group, into)]


def _even_parts(group: Group, num_parts: int) -> list[Group]:
    return [group.part(sorted(numbers)) for numbers in _spread(group.branch_tokens, num_parts, len(group.examples))]


def _most_tokens(sequences: Iterable[Group | Pack]) -> int:
    return max(sequence.num_tokens for sequence in sequences)


def _spread(sizes: Sequence[int], num_bins: int, max_each: int) -> list[list[int]]:
    """The numbers of the sizes in bins, longest first onto the least filled bin that has less than `max_each`."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, place) for place in range(num_bins)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        filled, place = heappop(heap)
        bins[place].append(number)
        if len(bins[place]) < max_each:
            heappush(heap, (filled + sizes[number], place))
    return bins


def row_batches(step: Sequence[Group], samples_per_forward: int, num_ranks: int = 1) -> list[list[Pack]]:
    """Groups of one example each, in their order, as even batches of rows; every rank has as many, fillers included."""
    num_packs = num_ranks * math.ceil(len(step) / (samples_per_forward * num_ranks))
    edges = [len(step) * number // num_packs for number in range(num_packs + 1)]
    packs = [Pack(tuple(step[start:end])) for start, end in pairwise(edges) if end > start]
    packs += [replace(packs[0], is_filler=True)] * (num_packs - len(packs))
    return [packs[rank::num_ranks] for rank in range(num_ranks)]


def padded_length(num_tokens: int) -> int:
    """The length that a pack of so many tokens is padded to, whole blocks.

    Lengths are a block apart, and from 4,096 tokens on a 16th to a 32nd of themselves, so that there are some dozens
    of them. Two blocks are the least: sizes of 1 are compiled for by themselves
    (https://docs.pytorch.org/docs/stable/torch.compiler_dynamic_shapes.html).
    """
    num_blocks = -(-num_tokens // BLOCK)
    apart = max((1 << num_blocks.bit_length() - 1) // 16, 1)
    return max(-(-num_blocks // apart) * apart, 2) * BLOCK
