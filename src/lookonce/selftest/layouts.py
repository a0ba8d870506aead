"""Packs as lengths, and the definition of which token attends to which.

Design: `allowed` follows from rows and not from the code that training uses. Each question is a row, its prefix and
then its branch, and a row is causal. The prefix is written once, and no row knows of another.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from lookonce.train.data.packing import padded_length

Lengths = tuple[int, tuple[int, ...]]
"""The length of a prefix, and of each of its branches."""


@dataclass(frozen=True)
class Layout:
    """The lengths of a pack."""

    groups: tuple[Lengths, ...]

    @property
    def length(self) -> int:
        """Tokens of the pack, padded to whole blocks."""
        return padded_length(sum(prefix + sum(branches) for prefix, branches in self.groups))

    def columns(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Segment and prefix of each token, as a batch has them."""
        segments: list[tuple[int, int]] = []
        for prefix, branches in self.groups:
            first = len(segments)
            segments += [(length, first) for length in (prefix, *branches)]
        segments.append((self.length - sum(length for length, _ in segments), len(segments)))
        rows = [(number, prefix) for number, (length, prefix) in enumerate(segments) for _ in range(length)]
        segment, prefix_of = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
        return segment, prefix_of

    def allowed(self, device: torch.device) -> torch.Tensor:
        """`[L, L]`, true where the row's token attends to the column's."""
        allowed = torch.zeros(self.length, self.length, dtype=torch.bool, device=device)
        start = 0
        for len_prefix, branches in self.groups:
            prefix = slice(start, start + len_prefix)
            start = _attends_to_itself(allowed, prefix)
            for len_branch in branches:
                branch = slice(start, start + len_branch)
                allowed[branch, prefix] = True
                start = _attends_to_itself(allowed, branch)
        _attends_to_itself(allowed, slice(start, self.length))
        return allowed


def _attends_to_itself(allowed: torch.Tensor, part: slice) -> int:
    """Make a part of the pack causal; returns where it ends."""
    allowed[part, part] = torch.ones_like(allowed[part, part]).tril()
    return int(part.stop)


def random_layout(rng: random.Random, max_tokens: int) -> Layout:
    """A pack of random lengths: one image or several, with 1 to 17 questions each, or no image."""
    wanted = rng.randint(1, max_tokens)
    groups: list[Lengths] = []
    while True:
        branches = tuple(rng.randint(1, 60) for _ in range(rng.randint(1, 17)))
        group = (rng.choice([0, rng.randint(1, 300)]), branches)
        wanted -= group[0] + sum(branches)
        if wanted < 0 and groups:
            return Layout(tuple(groups))
        groups.append(group)
        if wanted < 0:
            return Layout(tuple(groups))
