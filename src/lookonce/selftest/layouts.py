"""Packs as lengths, and the definition of which token attends to which.

Design: `allowed` follows from rows and not from the code that training uses. Each question is a row, its prefix and
then its branch, and a row is causal. What rows share is written once, and no row knows of another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch

from lookonce.train.data.packing import padded_length


class Lengths(NamedTuple):
    """The lengths of a group."""

    prefix: int
    branches: tuple[int, ...]
    shared: tuple[int, ...] = ()
    """How many tokens each branch shares with the one before it; empty if none shares any."""

    @property
    def num_tokens(self) -> int:
        return self.prefix + sum(self.branches) - sum(self.shared)


@dataclass(frozen=True)
class Layout:
    """The lengths of a pack."""

    groups: tuple[Lengths, ...]

    @property
    def length(self) -> int:
        """Tokens of the pack, padded to whole blocks."""
        return padded_length(sum(group.num_tokens for group in self.groups))

    def seen_until(self, device: torch.device) -> torch.Tensor:
        """The index behind the last token that attends to each token, as a batch has it: `[L]`."""
        queries = torch.arange(1, self.length + 1, device=device)[:, None]
        return (self.allowed(device) * queries).amax(dim=0).int()

    def allowed(self, device: torch.device) -> torch.Tensor:
        """`[L, L]`, true where the row's token attends to the column's."""
        allowed = torch.zeros(self.length, self.length, dtype=torch.bool, device=device)
        end = 0
        for prefix, branches, shared_tokens in self.groups:
            row = [*range(end, end + prefix)]
            end += prefix
            for branch, shared in zip_longest(branches, shared_tokens, fillvalue=0):
                row = row[: prefix + shared] + [*range(end, end + branch - shared)]
                end += branch - shared
                _attend(allowed, row)
        _attend(allowed, range(end, self.length))
        return allowed


def _attend(allowed: torch.Tensor, row: Sequence[int]) -> None:
    """Make a row causal, whose tokens have these indices in the pack."""
    indices = torch.tensor(row, dtype=torch.long, device=allowed.device)
    allowed[indices[:, None], indices] = torch.ones(len(row), len(row), dtype=torch.bool, device=allowed.device).tril()


def random_layout(rng: random.Random, max_tokens: int) -> Layout:
    """A pack of random lengths: one image or several, with 1 to 17 questions each, or no image."""
    wanted = rng.randint(1, max_tokens)
    groups: list[Lengths] = []
    while True:
        group = _random_group(rng)
        wanted -= group.num_tokens
        if wanted < 0 and groups:
            return Layout(tuple(groups))
        groups.append(group)
        if wanted < 0:
            return Layout(tuple(groups))


def _random_group(rng: random.Random) -> Lengths:
    """The branches of half of the groups share tokens, and each has at least one of its own."""
    branches = tuple(rng.randint(1, 60) for _ in range(rng.randint(1, 17)))
    shared = (0, *(rng.randint(0, min(before, this) - 1) for before, this in pairwise(branches)))
    return Lengths(rng.choice([0, rng.randint(1, 300)]), branches, rng.choice([(), shared]))
