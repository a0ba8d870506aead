"""Where the tokens of a wave lie in the buffer of keys and values.

Design: each group of questions has its prefix once, and behind each question there is room for the longest answer and
for later questions. The prompts are computed in packs of training, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.eval.decoding.branches import UNUSED
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.eval.decoding.waves import Room, groups_of
from lookonce.train.data.packing import Pack, pack_step

PADDING = 0
"""The place where passes write the keys and values of their padding, and the row for its states."""
Numbers = TypeVar("Numbers", int, torch.Tensor)


def state_rows(numbers: Numbers) -> Numbers:
    """The rows of states for the numbers of dialogues; `UNUSED` has that of padding."""
    return numbers - UNUSED


@dataclass(frozen=True)
class Spans:
    """The places that each branch attends to, `[N]`."""

    prefix: NDArray[np.int64]
    """The segment of its prefix."""
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    """The first place of its prefix, and the place behind its own room."""

    def subset(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Spans:
        """Those of some branches, by a mask or by their indices, which may repeat."""
        return Spans(self.prefix[chosen], self.first[chosen], self.end[chosen])


@dataclass(frozen=True)
class PackLayout:
    """Where the tokens of a pack lie in the buffer, and the branches of the pack.

    A segment is a prefix, or a branch with the room behind it. They are numbered after those of the packs before.
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

    @property
    def last_place(self) -> NDArray[np.int64]:
        """The place of each branch's last token."""
        return self.places[self.last]

    @classmethod
    def of(cls, pack: Pack, first_place: int, first_segment: int, room_behind: Sequence[int]) -> PackLayout:
        """`room_behind` has the places behind the prompt of each question of the wave."""
        lengths, rooms, examples, is_branch = [], [], [], []
        for group in pack.groups:
            lengths += [group.num_prefix_tokens, *group.branch_tokens]
            rooms += [0, *(room_behind[number] for number in group.examples)]
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


@dataclass(frozen=True)
class WaveLayout:
    """The packs of a wave, one behind another in the buffer."""

    dialogues: Sequence[Dialogue]
    packs: list[Pack]
    of_packs: list[PackLayout]

    @classmethod
    def of(cls, wave: Sequence[Dialogue], image_token_id: int, room: Room) -> WaveLayout:
        """The layout of a wave, in packs of `room.tokens_per_pack`, or longer ones if a question is."""
        longest = max(dialogue.first.num_tokens for dialogue in wave)
        [packs] = pack_step(groups_of(wave, image_token_id), max(room.tokens_per_pack, longest))
        room_behind = [dialogue.room(room.max_new_tokens) for dialogue in wave]
        layouts: list[PackLayout] = []
        num_places, num_segments = PADDING + 1, 0
        for pack in packs:
            layouts.append(PackLayout.of(pack, num_places, num_segments, room_behind))
            num_places += len(layouts[-1].segments)
            num_segments += sum(1 + len(group.examples) for group in pack.groups)
        return cls(wave, packs, layouts)

    def column(self, name: str) -> NDArray[np.int64]:
        """A column of all packs, by its name in `PackLayout`."""
        return np.concatenate([getattr(layout, name) for layout in self.of_packs])

    def starts(self, device: torch.device) -> dict[str, torch.Tensor]:
        """For `Branches`: where the first answer of each dialogue begins, and its segments."""
        columns = {name: self.column(name) for name in ("examples", "branch", "prefix", "last_place")}
        examples, segment, prefix, last = (torch.from_numpy(column).to(device) for column in columns.values())
        return {"examples": examples, "segment": segment, "prefix": prefix, "place": last + 1}

    @property
    def segments(self) -> NDArray[np.int64]:
        """The segment of each place; that of padding is unused."""
        return np.concatenate([[UNUSED], self.column("segments")])

    @property
    def num_states(self) -> int:
        """The rows of states, with that of padding."""
        return PADDING + 1 + sum(dialogue.num_states for dialogue in self.dialogues)

    @cached_property
    def copies(self) -> dict[int, int]:
        """The second row of each dialogue that has one, by its number."""
        several = [number for number, dialogue in enumerate(self.dialogues) if dialogue.num_states > 1]
        return {number: PADDING + 1 + len(self.dialogues) + place for place, number in enumerate(several)}

    @property
    def spans(self) -> Spans:
        return Spans(self.column("prefix"), self.column("first"), self.column("end"))
