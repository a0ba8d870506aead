"""Groups of examples that share their images, and packs of groups: training sequences that fit the GPU, for each rank.

A group's *prefix* is the tokens that all its examples begin with: through the last image, and into the question as far
as they agree. The rest of each example is its *branch*. The prefix ends before the first supervised token, but its last
token predicts the first token of every branch. A branch ends with the token that its last target is predicted from: no
target attends to what follows, so leaving it out changes no loss and no gradient.

Branches may begin alike too, with earlier answers (`data.context`) or with the same words. `nested` puts them in
lexical order: each branch shares its first tokens with the one before it, and they go through the model once. So
prefixes have any number of levels, and what some members share follows from what neighbours share. Tokens are compared
as bytes, in microseconds per example: one more space before an image makes another group. Examples of two stages are in
two groups, because a group is trained on together.

A step has as few packs as possible, all of about the same length, because the longest pack determines the memory that
is needed and how long ranks wait for each other. Groups are taken longest first, and each goes into the least filled
pack (Graham's LPT rule, https://doi.org/10.1137/0117039). If a pack becomes too long, packing starts again with more
packs, which costs one too many in some steps. The packs of large steps are more than nine tenths full. With several
ranks, the longest and the shortest pack then exchange groups while that makes them more alike, since packs that are a
few tokens apart may be padded to lengths that are 256 apart.

Every rank gets the same number of packs; the other ranks would otherwise wait for it forever. A group is split, and its
prefix repeated, if it is longer than a pack or if there are fewer groups than packs. If nothing is left to split, a
rank repeats a pack with target weights of 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from lookonce.train.data.tokenize import Example

BLOCK = 128
"""Tokens per block of FlexAttention's kernels; on a GPU, packs are padded to whole blocks."""
ALIKE = BLOCK // 4
"""Packs whose numbers of tokens differ by no more are not made more alike."""
MOST_BINS, MOST_PAIRS = 64, 2_500
"""With more, no groups are exchanged: it would take long, and the packs of many groups are alike."""
GROWTH = 0.01
"""Share of packs added per attempt, so that a whole validation split, which is one step, takes few attempts."""


@dataclass(frozen=True)
class Group:
    """Examples with the same prefix."""

    examples: tuple[int, ...]
    """Indices of the examples in the list that was grouped."""
    len_prefix: int
    """Length of the prefix with one placeholder per image, as in `Example.token_ids`."""
    num_prefix_tokens: int
    """Length of the prefix with placeholders expanded."""
    branch_tokens: tuple[int, ...]
    """Length of each example's branch, at least 1; all of it, if the example has no target."""
    stage: int = 0
    shared_tokens: tuple[int, ...] = ()
    """How many tokens each branch shares with the branch before it, 0 for the first; empty if none shares any."""

    @property
    def num_tokens(self) -> int:
        """Length of the prefix and of all branches, with what is shared once."""
        return self.num_prefix_tokens + sum(self.branch_tokens) - sum(self.shared_tokens)

    def subset(self, members: Iterable[int]) -> Group:
        """Some of the examples, by their positions in `examples`, in the order of the group.

        The prefix stays, even if they share a longer one.
        """
        chosen = sorted(members)
        return replace(
            self,
            examples=tuple(self.examples[member] for member in chosen),
            branch_tokens=tuple(self.branch_tokens[member] for member in chosen),
            shared_tokens=self._shared(chosen) if self.shared_tokens else (),
        )

    def whole(self, examples: Sequence[Example]) -> Group:
        """The group with branches that end where the examples do, as in padded rows."""
        lengths = (examples[index].num_tokens - self.num_prefix_tokens for index in self.examples)
        return replace(self, branch_tokens=tuple(lengths))

    def _shared(self, chosen: Sequence[int]) -> tuple[int, ...]:
        """Two branches of a sorted group share the least that any neighbours between them share."""
        return (0, *(min(self.shared_tokens[before + 1 : this + 1]) for before, this in pairwise(chosen)))


def group_examples(examples: Sequence[Example], image_token_id: int) -> list[Group]:
    """All examples in groups, ordered by each group's first example. An example without images is a group by itself."""
    members: dict[object, list[int]] = {}
    placeholder = np.array(image_token_id, examples[0].token_ids.dtype).tobytes() if examples else b""
    for index, example in enumerate(examples):
        through_images = _through_images(example, placeholder) if example.image_keys else index
        shared = (example.stage, example.image_keys, through_images)
        members.setdefault(shared, []).append(index)
    return [_group(indices, [examples[index] for index in indices], image_token_id) for indices in members.values()]


def _group(indices: Sequence[int], examples: Sequence[Example], image_token_id: int) -> Group:
    first = examples[0]
    len_prefix = _len_prefix(examples) if first.image_keys else 0
    num_images = np.count_nonzero(first.token_ids[:len_prefix] == image_token_id)
    assert num_images == len(first.image_keys), f"{first.origin}: an answer before the last image"
    num_prefix_tokens = len_prefix - len(first.image_keys) + sum(first.num_image_tokens)
    branch_tokens = tuple(_num_needed(example) - len_prefix for example in examples)
    return Group(tuple(indices), len_prefix, num_prefix_tokens, branch_tokens, first.stage)


def nested(group: Group, examples: Sequence[Example]) -> Group:
    """The group with its branches in lexical order, and what each shares with the one before it.

    As in the prefix, no target is shared, and each branch keeps at least one token.
    """
    rows = [
        examples[index].token_ids[group.len_prefix : _first_supervised(examples[index])].tobytes()
        for index in group.examples
    ]
    members = sorted(range(len(rows)), key=rows.__getitem__)
    dtype = examples[group.examples[0]].token_ids.dtype
    shared = [_len_common(rows[before], rows[this], dtype) for before, this in pairwise(members)]
    return replace(
        group,
        examples=tuple(group.examples[member] for member in members),
        branch_tokens=tuple(group.branch_tokens[member] for member in members),
        shared_tokens=(0, *shared) if any(shared) else (),
    )


def _through_images(example: Example, placeholder: bytes) -> bytes:
    """The tokens up to the last placeholder and the token after it, which ends the image."""
    token_ids, size = example.token_ids.tobytes(), len(placeholder)
    last = token_ids.rfind(placeholder)
    while last % size:  # bytes of two other tokens
        last = token_ids.rfind(placeholder, 0, last + size - 1)
    return token_ids[: last + 2 * size]


def _len_prefix(examples: Sequence[Example]) -> int:
    """The number of leading tokens that all examples share; each keeps at least one token, and all its targets.

    Tokens shared by the first and the last example in lexical order are shared by all examples between them, so one
    comparison of two arrays suffices. Any order will do; here it is that of the bytes.
    """
    limit = min(_first_supervised(example) for example in examples)
    rows = [example.token_ids[:limit].tobytes() for example in examples]
    return _len_common(min(rows), max(rows), examples[0].token_ids.dtype)


def _len_common(first: bytes, second: bytes, dtype: np.dtype[Any]) -> int:
    """The number of leading tokens that two rows share."""
    size = min(len(first), len(second)) // dtype.itemsize
    differs = np.frombuffer(first, dtype, size) != np.frombuffer(second, dtype, size)
    return int(differs.argmax()) if differs.any() else size


def _num_needed(example: Example) -> int:
    """The number of leading tokens that targets are predicted from, with one placeholder per image; more than those
    before the first target, so that no branch is empty. All of them if there are no targets."""
    if not example.supervised.any():
        return len(example.token_ids)
    last = len(example.supervised) - 1 - int(example.supervised[::-1].argmax())
    return max(last, _first_supervised(example) + 1)


def _first_supervised(example: Example) -> int:
    """The index of the first supervised token, or of the last token if none is, as in a question without an answer."""
    first = int(example.supervised.argmax())
    return first if example.supervised[first] else len(example.token_ids) - 1


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
    def examples(self) -> list[int]:
        """The indices of its examples, in the order of the groups."""
        return [index for group in self.groups for index in group.examples]

    @property
    def num_samples(self) -> int:
        """Number of examples, those of a filler included."""
        return len(self.examples)


def pack_step(step: Sequence[Group], tokens_per_pack: int, num_ranks: int = 1) -> list[list[Pack]]:
    """The packs of each rank, longest first. Ranks have equally many packs, at least one, and about as many tokens.

    Raises:
        ValueError: one example is longer than a pack.
    """
    groups = [fitting for group in step for fitting in _split_to_fit(group, tokens_per_pack)]
    num_packs = num_ranks * math.ceil(sum(group.num_tokens for group in groups) / (tokens_per_pack * num_ranks))
    while _most_tokens(packs := _packs(groups, num_packs, num_ranks > 1)) > tokens_per_pack:
        num_packs += num_ranks * math.ceil(num_packs / num_ranks * GROWTH)
    filler = replace(min(packs, key=lambda pack: pack.num_tokens), is_filler=True)
    packs += [filler] * (num_packs - len(packs))
    ranks = _distribute([pack.num_tokens for pack in packs], num_ranks, num_packs // num_ranks, exchanges=True)
    return [[packs[index] for index in indices] for indices in ranks]


def _packs(groups: Sequence[Group], num_packs: int, exchanges: bool) -> list[Pack]:
    """All groups in `num_packs` packs of any length; in fewer packs if the groups cannot be split further."""
    groups = _split_further(groups, num_packs)
    packs = _distribute([group.num_tokens for group in groups], num_packs, len(groups), exchanges)
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
    return [group.subset(sorted(chosen)) for chosen in members]


def _most_tokens(sequences: Iterable[Group | Pack]) -> int:
    return max(sequence.num_tokens for sequence in sequences)


def _distribute(sizes: Sequence[int], num_bins: int, max_each: int, exchanges: bool = False) -> list[list[int]]:
    """The indices of `sizes` in bins of at most `max_each`, largest first.

    Each goes into the least filled bin with room; then some are exchanged, if it `exchanges`.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        filled, number = heappop(heap)
        bins[number].append(index)
        if len(bins[number]) < max_each:
            heappush(heap, (filled + sizes[index], number))
    if exchanges and num_bins <= MOST_BINS:
        _exchange(bins, sizes)
    return [sorted(indices, key=lambda index: (-sizes[index], index)) for indices in bins]


def _exchange(bins: list[list[int]], sizes: Sequence[int]) -> None:
    """Make the fullest and the least filled bin more alike, at most as many times as there are bins.

    One index goes for another, so no bin has more of them than before, which could leave a rank without a pack.
    """
    filled = [sum(sizes[index] for index in indices) for indices in bins]
    for _ in bins:
        most, least = filled.index(max(filled)), filled.index(min(filled))
        difference = filled[most] - filled[least]
        if difference <= ALIKE or len(bins[most]) * len(bins[least]) > MOST_PAIRS:
            break
        pairs = [(sizes[mine] - sizes[its], mine, its) for mine in bins[most] for its in bins[least]]
        helpful = [pair for pair in pairs if 0 < pair[0] < difference]
        if not helpful:
            break
        moved, mine, its = min(helpful, key=lambda pair: abs(2 * pair[0] - difference))
        bins[most][bins[most].index(mine)], bins[least][bins[least].index(its)] = its, mine
        filled[most] -= moved
        filled[least] += moved


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
