"""Which questions are answered together, and where their tokens lie.

Design: a *wave* is as many questions as the buffer of keys and values has places for. Questions are grouped by their
images as in training, each group's prefix gets its places once, and behind each question there is room for the longest
answer. Groups are taken in the order of the records, so that a wave is the same whenever it is planned, and the answers
of an interrupted evaluation have the bits of an uninterrupted one. A group with more questions than places is split,
and its prefix computed again. Within a wave the prompts are computed in packs of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookonce.eval.decoding.branches import UNUSED
from lookonce.train.data.groups import Group, group_examples
from lookonce.train.data.packing import Pack, pack_step
from lookonce.train.data.tokenize import Example


@dataclass(frozen=True)
class Room:
    """How much is computed together."""

    num_places: int
    """Tokens in the buffer of keys and values: prompts, and room for answers."""
    tokens_per_pack: int
    """Tokens of prompts that are computed in one pass."""
    max_new_tokens: int

    def places_of(self, group: Group) -> int:
        """The places of a group's prefix, and of its branches with their answers."""
        return group.num_tokens + len(group.examples) * self.max_new_tokens


def plan_waves(examples: Sequence[Example], image_token_id: int, room: Room) -> list[list[int]]:
    """The numbers of the questions of each wave; one with more tokens than there are places is a wave by itself."""
    waves: list[list[int]] = []
    free = 0
    for group in group_examples(examples, image_token_id):
        for part in _split(group, room):
            needed = room.places_of(part)
            if needed > free or not waves:
                waves.append([])
                free = room.num_places
            waves[-1] += part.examples
            free -= needed
    return waves


def _split(group: Group, room: Room) -> list[Group]:
    """The group in parts that each have places, or have one question."""
    parts: list[list[int]] = [[]]
    free = room.num_places - group.num_prefix_tokens
    for member, num_tokens in enumerate(group.branch_tokens):
        needed = num_tokens + room.max_new_tokens
        if needed > free and parts[-1]:
            parts.append([])
            free = room.num_places - group.num_prefix_tokens
        parts[-1].append(member)
        free -= needed
    return [group.subset(members) for members in parts]


def packs_of(wave: Sequence[Example], image_token_id: int, tokens_per_pack: int) -> list[Pack]:
    """The packs in which a wave's prompts are computed; longer ones if a question needs them."""
    longest = max(example.num_tokens for example in wave)
    [packs] = pack_step(group_examples(wave, image_token_id), max(tokens_per_pack, longest))
    return packs


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a pack lie in the buffer, and the branches of the pack.

    Segments are numbered as the collator of packs numbers them, after those of the packs before.
    """

    places: NDArray[np.int64]
    """The place of each token, `[L]`."""
    segments: NDArray[np.int64]
    """The segment of each place of the pack, room for answers included."""
    examples: NDArray[np.int64]
    """The number of each branch's question, `[N]`; so have the others one entry for each branch."""
    branch: NDArray[np.int64]
    prefix: NDArray[np.int64]
    """The segment of each branch and of its prefix."""
    last: NDArray[np.int64]
    """The index of each branch's last token in the pack."""
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    """The first place of each branch's prefix, and the place behind the room of the branch."""

    @classmethod
    def of(cls, pack: Pack, first_place: int, first_segment: int, max_new_tokens: int) -> Layout:
        lengths, rooms, examples, is_branch = [], [], [], []
        for group in pack.groups:
            lengths += [group.num_prefix_tokens, *group.branch_tokens]
            rooms += [0, *[max_new_tokens] * len(group.examples)]
            examples += [UNUSED, *group.examples]
            is_branch += [False, *[True] * len(group.examples)]
        num_tokens, num_places = np.array(lengths), np.array(lengths) + np.array(rooms)
        number = first_segment + np.arange(len(lengths))
        chosen = np.array(is_branch)
        prefix = np.maximum.accumulate(np.where(chosen, 0, number))
        starts = first_place + np.cumsum(num_places) - num_places
        ends = np.cumsum(num_tokens)
        is_first = ~chosen
        group_starts = starts[is_first][np.cumsum(is_first) - 1]
        within = np.arange(ends[-1]) - np.repeat(ends - num_tokens, num_tokens)
        return cls(
            places=np.repeat(starts, num_tokens) + within,
            segments=np.repeat(number, num_places),
            examples=np.array(examples)[chosen],
            branch=number[chosen],
            prefix=prefix[chosen],
            last=(ends - 1)[chosen],
            first=group_starts[chosen],
            end=(starts + num_places)[chosen],
        )
