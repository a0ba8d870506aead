"""Which questions are answered together, where their tokens lie in the buffer, and how far their answers are.

A *batch* is as many questions as the buffer of keys and values has slots for, and as there are rows for states of
linear attention. Questions are grouped by their images as in training: each group's prefix has its slots once, and
behind each question there is room for the longest answer. Groups are taken in the order of the records, so a resumed
evaluation has the same batches, and the same bits. A group that does not fit is split, and its prefix computed again.

Samples of a question are branches of its prompt, as questions are branches of their image. So the slots of a batch are
a tree in depth-first order, as a pack is: what continues a token lies behind it, up to a slot that is known beforehand.

Growing answers are columns of tensors on the device, one for each branch, changed in place. So a pass can be captured
as a CUDA graph, and the CPU asks only now and then which answers have ended. Until a branch that has ended leaves the
batch, passes overwrite its last token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.eval.decoding.sampling import Chooser
from lookonce.train.data.packing import Group, Pack, group_examples, pack_step
from lookonce.train.data.tokenize import Example


@dataclass(frozen=True)
class Room:
    num_slots: int
    """Tokens in the buffer of keys and values: prompts, and room for answers."""
    tokens_per_pack: int
    """Tokens of prompts that are computed in one pass."""
    max_new_tokens: int
    num_states: int | None = None
    """Answers, or states of linear attention, that are in memory together; None if there is no limit."""
    num_samples: int = 1
    """Answers to each question."""

    @property
    def free(self) -> NDArray[np.float64]:
        """The slots and states of a batch."""
        return np.array([self.num_slots, self.num_states or math.inf])


def needed(num_tokens: int, behind: Sequence[int], room: Room) -> NDArray[np.int64]:
    """The slots and states of questions whose prompts have `num_tokens`, each with some slots behind it."""
    return np.array([num_tokens + sum(behind), len(behind) * room.num_samples])


def plan_batches(prompts: Sequence[Example], behind: Sequence[int], image_token_id: int, room: Room) -> list[list[int]]:
    """The numbers of the questions of each batch; one with more tokens than there are slots is a batch by itself.

    `behind` has the slots that each question needs behind its prompt.
    """
    batches: list[list[int]] = []
    free = room.free
    for group in group_examples(prompts, image_token_id):
        for part in _split(group, behind, room):
            required = needed(part.num_tokens, [behind[number] for number in part.examples], room)
            if (required > free).any() or not batches:
                batches.append([])
                free = room.free
            batches[-1] += part.examples
            free = free - required
    return batches


def _split(group: Group, behind: Sequence[int], room: Room) -> list[Group]:
    """The group in parts that each have room, or have one question."""
    parts: list[list[int]] = [[]]
    free = empty = room.free - [group.num_prefix_tokens, 0]
    for member, num_tokens in enumerate(group.branch_tokens):
        required = needed(num_tokens, [behind[group.examples[member]]], room)
        if (required > free).any() and parts[-1]:
            parts.append([])
            free = empty
        parts[-1].append(member)
        free = free - required
    return [group.subset(members) for members in parts]


UNUSED = -1
"""The number of a question that is none."""


@dataclass
class Branches:
    """Branches that are being answered; `N` of them. The next pass computes the latest token of each."""

    slot: torch.Tensor
    """The slot where the pass writes the keys and values of the token, `[N]`."""
    position: torch.Tensor
    """The token's position, on all three axes, `[N]`."""
    token: torch.Tensor
    """The latest token, `[N]`."""
    examples: torch.Tensor
    """The number of each one's answer: that of its question, or of several samples `question * num_samples + sample`,
    `[N]`."""
    noise: torch.Tensor
    """The number from which the noise of each sample is made, `[N]`."""
    ended: torch.Tensor
    """Whether the latest token is the end token, `[N]`."""
    tokens: torch.Tensor
    """The answers so far, filled up with the end token, `[N, max_new_tokens]`."""
    logprobs: torch.Tensor
    """The log-probabilities of each token as the chooser gives them, and 0 behind the end token,
    `[N, max_new_tokens, K]`."""

    def subset(self, chosen: torch.Tensor | slice) -> Branches:
        """Some of them, by their indices or by a mask `[N]`; those of a slice share their tensors with these."""
        return Branches(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    @classmethod
    def unused(cls, number: int, slot: int, max_new_tokens: int, chooser: Chooser, device: torch.device) -> Branches:
        """Branches that belong to no question, and have ended; `slot` is one for padding, where they write."""

        def column(value: int) -> torch.Tensor:
            return torch.full((number,), value, device=device)

        return cls(
            slot=column(slot),
            position=column(0),
            token=column(chooser.end_token_id),
            examples=column(UNUSED),
            noise=column(0),
            ended=torch.ones(number, dtype=torch.bool, device=device),
            tokens=torch.full((number, max_new_tokens), chooser.end_token_id, device=device),
            logprobs=torch.zeros(number, max_new_tokens, chooser.num_logprobs, device=device),
        )

    @classmethod
    def answering(
        cls, logits: torch.Tensor, max_new_tokens: int, chooser: Chooser, **columns: torch.Tensor
    ) -> Branches:
        """Branches with the first token of each answer, chosen by `logits` `[N, vocabulary]`."""
        device, number = logits.device, len(logits)
        unused = cls.unused(number, UNUSED, max_new_tokens, chooser, device)
        branches = replace(unused, ended=torch.zeros(number, dtype=torch.bool, device=device), **columns)
        branches.add(torch.tensor([0], device=device), logits, chooser)
        return branches

    def add(self, number: torch.Tensor, logits: torch.Tensor, chooser: Chooser) -> None:
        """Choose token `number` `[1]` of each answer. `logits` `[N, vocabulary]`."""
        token, logprobs = chooser(logits.float(), number, self.noise)
        self.token.copy_(torch.where(self.ended, chooser.end_token_id, token))
        self.tokens.index_copy_(1, number, self.token[:, None])
        self.logprobs.index_copy_(1, number, torch.where(self.ended[:, None], 0.0, logprobs)[:, None])
        self.ended |= token == chooser.end_token_id

    def advance(self) -> None:
        """Move on to the slot and the position of the token that is added next."""
        self.slot += ~self.ended
        self.position += ~self.ended

    def load(self, branches: Branches) -> None:
        """Overwrite the first branches with others, in the same tensors."""
        for field in fields(self):
            column = getattr(branches, field.name)
            getattr(self, field.name)[: len(column)].copy_(column)


PADDING = 0
"""The slot where passes write the keys and values of their padding, and the row for its states."""
Numbers = TypeVar("Numbers", int, torch.Tensor)


def state_rows(numbers: Numbers) -> Numbers:
    """The rows of states for the numbers of questions; `UNUSED` has that of padding."""
    return numbers - UNUSED


@dataclass(frozen=True)
class Spans:
    """The slots that each branch attends to, `[N]`."""

    first: NDArray[np.int64]
    end: NDArray[np.int64]
    """The first slot of its prefix, and the slot behind its own room."""

    def subset(self, chosen: NDArray[np.bool_]) -> Spans:
        return Spans(self.first[chosen], self.end[chosen])


@dataclass(frozen=True)
class BatchLayout:
    """Where the tokens of a batch lie in the buffer: its packs, one behind another, after the slot of padding.

    A segment is a prefix, or a question with the room for its answers behind it. `N` answers, those to a question one
    after another.
    """

    prompts: Sequence[Example]
    packs: list[Pack]
    slots: list[NDArray[np.int64]]
    """The slot of each token of each pack."""
    last: list[NDArray[np.int64]]
    """The indices in each pack of the last tokens of its questions."""
    until: NDArray[np.int64]
    """The slot before which tokens attend to that of each slot; padding is attended to by itself."""
    examples: NDArray[np.int64]
    """The number of each answer, as in `Branches`, `[N]`."""
    begin: NDArray[np.int64]
    """The first slot of each answer, `[N]`."""
    spans: Spans

    @classmethod
    def of(cls, prompts: Sequence[Example], image_token_id: int, room: Room) -> BatchLayout:
        """The layout of a batch, in packs of `room.tokens_per_pack`, or longer ones if a question is."""
        longest = max(prompt.num_tokens for prompt in prompts)
        [packs] = pack_step(group_examples(prompts, image_token_id), max(room.tokens_per_pack, longest))
        return cls.of_packs(prompts, packs, room.max_new_tokens, room.num_samples)

    @classmethod
    def of_packs(
        cls, prompts: Sequence[Example], packs: list[Pack], max_new_tokens: int, num_samples: int = 1
    ) -> BatchLayout:
        lengths, rooms, examples = [], [], []
        for group in (group for pack in packs for group in pack.groups):
            lengths += [group.num_prefix_tokens, *group.branch_tokens]
            rooms += [0, *[num_samples * max_new_tokens] * len(group.examples)]
            examples += [UNUSED, *group.examples]
        of_segment, num_tokens = np.array(examples), np.array(lengths)
        num_slots, is_branch = num_tokens + np.array(rooms), of_segment != UNUSED
        starts, ends = PADDING + 1 + np.cumsum(num_slots) - num_slots, np.cumsum(num_tokens)
        slots = np.repeat(starts - (ends - num_tokens), num_tokens) + np.arange(ends[-1])
        sizes, branches = ([pack.num_tokens for pack in packs], [pack.num_samples for pack in packs])
        first_token = np.repeat(np.cumsum(sizes) - sizes, branches)
        prefixes, group_of = np.flatnonzero(~is_branch), np.cumsum(~is_branch) - 1
        closed = starts + num_slots
        closed = np.where(is_branch, closed, np.maximum.reduceat(closed, prefixes)[group_of])
        samples = np.arange(num_samples)
        begin = ((starts + num_tokens)[is_branch, None] + max_new_tokens * samples).ravel()
        until = np.concatenate([[PADDING + 1], np.repeat(closed, num_slots)])
        until[begin[:, None] + np.arange(max_new_tokens)] = begin[:, None] + max_new_tokens
        return cls(
            prompts=prompts,
            packs=packs,
            slots=np.split(slots, np.cumsum(sizes)[:-1]),
            last=np.split(ends[is_branch] - 1 - first_token, np.cumsum(branches)[:-1]),
            until=until,
            examples=(of_segment[is_branch, None] * num_samples + samples).ravel(),
            begin=begin,
            spans=Spans(np.repeat(starts[prefixes][group_of][is_branch], num_samples), begin + max_new_tokens),
        )

    def starts(self, device: torch.device) -> dict[str, torch.Tensor]:
        """For `Branches`: where each answer begins."""
        columns = {"examples": self.examples, "slot": self.begin}
        return {name: torch.from_numpy(column).to(device) for name, column in columns.items()}
