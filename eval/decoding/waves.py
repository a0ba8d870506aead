"""Which questions are answered together.

Design: a *wave* is as many questions as the buffer of keys and values has places for. Questions are grouped by their
images as in training, each group's prefix gets its places once, and behind each question there is room for the longest
answer, and for the later questions of its dialogue. Groups are taken in the order of the records, so that a wave is the
same whenever it is planned, and the answers of an interrupted evaluation have the bits of an uninterrupted one. A group
with more questions than places is split, and its prefix computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.train.data.groups import Group, group_examples


@dataclass(frozen=True)
class Room:
    """How much is computed together."""

    num_places: int
    """Tokens in the buffer of keys and values: prompts, and room for answers."""
    tokens_per_pack: int
    """Tokens of prompts that are computed in one pass."""
    max_new_tokens: int

    def places_of(self, group: Group, dialogues: Sequence[Dialogue]) -> int:
        """The places of a group's prefix, and of its branches with what follows them."""
        return group.num_tokens + sum(dialogues[number].room(self.max_new_tokens) for number in group.examples)


def groups_of(dialogues: Sequence[Dialogue], image_token_id: int) -> list[Group]:
    """The first prompts of dialogues in groups that share their prefixes."""
    return group_examples([dialogue.first for dialogue in dialogues], image_token_id)


def plan_waves(dialogues: Sequence[Dialogue], image_token_id: int, room: Room) -> list[list[int]]:
    """The numbers of the dialogues of each wave; one with more tokens than there are places is a wave by itself."""
    waves: list[list[int]] = []
    free = 0
    for group in groups_of(dialogues, image_token_id):
        for part in _split(group, dialogues, room):
            needed = room.places_of(part, dialogues)
            if needed > free or not waves:
                waves.append([])
                free = room.num_places
            waves[-1] += part.examples
            free -= needed
    return waves


def _split(group: Group, dialogues: Sequence[Dialogue], room: Room) -> list[Group]:
    """The group in parts that each have places, or have one dialogue."""
    parts: list[list[int]] = [[]]
    free = room.num_places - group.num_prefix_tokens
    for member, num_tokens in enumerate(group.branch_tokens):
        needed = num_tokens + dialogues[group.examples[member]].room(room.max_new_tokens)
        if needed > free and parts[-1]:
            parts.append([])
            free = room.num_places - group.num_prefix_tokens
        parts[-1].append(member)
        free -= needed
    return [group.subset(members) for members in parts]
