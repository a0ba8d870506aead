"""Which questions are answered together.

Design: a *wave* is as many questions as the buffer of keys and values has places for, and in models with linear
attention as there are rows for their states. Questions are grouped by their images as in training, each group's prefix
gets its places once, and behind each question there is room for the longest answer, and for the later questions of its
dialogue. Groups are taken in the order of the records, so that a wave is the same whenever it is planned, and the
answers of an interrupted evaluation have the bits of an uninterrupted one. A group with more questions than there is
room for is split, and its prefix computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.train.data.packing import Group, group_examples


class Needed(NamedTuple):
    """What some questions take of the memory."""

    places: float
    states: float

    def fits(self, free: Needed) -> bool:
        return self.places <= free.places and self.states <= free.states

    def less(self, other: Needed) -> Needed:
        return Needed(self.places - other.places, self.states - other.states)


@dataclass(frozen=True)
class Room:
    """How much is computed together."""

    num_places: int
    """Tokens in the buffer of keys and values: prompts, and room for answers."""
    tokens_per_pack: int
    """Tokens of prompts that are computed in one pass."""
    max_new_tokens: int
    num_states: int | None = None
    """States of linear attention that are in memory together; None if there is no limit."""

    @property
    def free(self) -> Needed:
        """What a wave has room for."""
        return Needed(self.num_places, self.num_states or math.inf)

    def places_of(self, group: Group, dialogues: Sequence[Dialogue]) -> int:
        """The places of a group's prefix, and of its branches with what follows them."""
        return group.num_tokens + sum(dialogues[number].room(self.max_new_tokens) for number in group.examples)

    def needed(self, group: Group, dialogues: Sequence[Dialogue]) -> Needed:
        """The places and states of a group."""
        return Needed(self.places_of(group, dialogues), sum(dialogues[number].num_states for number in group.examples))


def groups_of(dialogues: Sequence[Dialogue], image_token_id: int) -> list[Group]:
    """The first prompts of dialogues in groups that share their prefixes."""
    return group_examples([dialogue.first for dialogue in dialogues], image_token_id)


def plan_waves(dialogues: Sequence[Dialogue], image_token_id: int, room: Room) -> list[list[int]]:
    """The numbers of the dialogues of each wave; one with more tokens than there are places is a wave by itself."""
    waves: list[list[int]] = []
    free = room.free
    for group in groups_of(dialogues, image_token_id):
        for part in _split(group, dialogues, room):
            needed = room.needed(part, dialogues)
            if not needed.fits(free) or not waves:
                waves.append([])
                free = room.free
            waves[-1] += part.examples
            free = free.less(needed)
    return waves


def _split(group: Group, dialogues: Sequence[Dialogue], room: Room) -> list[Group]:
    """The group in parts that each have room, or have one dialogue."""
    parts: list[list[int]] = [[]]
    empty = room.free.less(Needed(group.num_prefix_tokens, 0))
    free = empty
    for member, num_tokens in enumerate(group.branch_tokens):
        dialogue = dialogues[group.examples[member]]
        needed = Needed(num_tokens + dialogue.room(room.max_new_tokens), dialogue.num_states)
        if not needed.fits(free) and parts[-1]:
            parts.append([])
            free = empty
        parts[-1].append(member)
        free = free.less(needed)
    return [group.subset(members) for members in parts]
