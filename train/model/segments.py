"""A pack cut into segments, in the order in which a state runs through them.

A pack is a tree in depth-first order. A segment is a part without branches: it begins where `seen_until` changes, that
is behind a token that also something later continues, or that nothing more does. So a token of a segment continues the
one before it, and its first token continues the last one of another segment, or nothing.

Design: a state runs over the segments of one depth in one call, which has their tokens end to end, and from there to
the next depth. So a pass takes as many calls as there are depths. Kernels compute chunks of 64 tokens, so a segment
that is shorter than that would cost a chunk, and a state in memory, for each of its depths. What continues it therefore
has its tokens once more instead, and begins where it did; most packs have two depths then. Before each sequence are
some tokens for computations that look back over them, and which change no state. It is worked out on the CPU, some
microseconds a segment; a GPU has to hand over `seen_until`, once a pack.

Shapes: `L` tokens of the pack with padding, `N` segments of a depth, `B` tokens before, `T` tokens of a depth's call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

Column = NDArray[np.int64]
SHORT = 60
"""A sequence of at most this many tokens is repeated in front of what continues it. A chunk has 64."""


@dataclass(frozen=True)
class Depth:
    """The sequences of one call. Each has the tokens of short segments that it continues, and its own.

    Behind it are those that the next one looks back at: there they keep the chunks of all sequences as they would be.
    """

    tokens: torch.Tensor
    """`[B + T]`: the tokens before the first sequence, then those of all; `L` is no token."""
    changing: torch.Tensor
    """`[T]`: those of all, but no token where one is only looked back at."""
    ends: torch.Tensor
    """`[N + 1]`: where each sequence begins among the `T`, and where the last one ends."""
    ends_on_cpu: torch.Tensor
    parents: torch.Tensor
    """`[N]`: the number, in the depth before, of the segment that each continues; 0 if it continues none."""


@dataclass(frozen=True)
class Segments:
    """All segments of a pack."""

    depths: tuple[Depth, ...]
    """First those that continue nothing."""
    places: torch.Tensor
    """`[L]`: where a token's result is if those of all depths are laid end to end."""
    numbers: torch.Tensor
    """`[L]`: the number of a token's segment, counted through all depths."""
    last: torch.Tensor
    """`[segments, B]`: the last tokens of each segment, after those before it; `L` is no token."""


@dataclass(frozen=True)
class _Segment:
    tokens: Column
    """Those of short segments that it continues, and its own."""
    own: Column
    before: Column
    """`[B]`: the tokens before the first one; `L` where there is none."""
    depth: int
    number: int
    """Among those of its depth."""
    parent: int
    """The number of the segment that it continues; 0 for none."""

    @property
    def last(self) -> Column:
        """`[B]`: the last tokens up to its end."""
        return np.concatenate([self.before, self.tokens])[len(self.tokens) :]


def segments_of(seen_until: torch.Tensor, num_before: int, short: int = SHORT) -> Segments:
    """The segments of a pack, with `num_before` tokens before each. `seen_until` is `[L]`."""
    segments = sorted(_cut(seen_until.cpu().numpy(), num_before, short), key=lambda one: one.depth)
    depths, begin, device = [], 0, seen_until.device
    places, numbers = (np.empty(len(seen_until), dtype=np.int64) for _ in range(2))
    for number, one in enumerate(segments):
        numbers[one.own] = number
    for _, members in groupby(segments, key=lambda one: one.depth):
        same = list(members)
        ends = np.cumsum([0, *(len(one.tokens) + num_before for one in same)])
        for one, start in zip(same, ends[:-1], strict=True):
            places[one.own] = begin + start + len(one.tokens) - len(one.own) + np.arange(len(one.own))
        ends[-1] -= num_before
        depths.append(_depth(same, ends, num_before, len(seen_until), device))
        begin += ends[-1]
    last = np.stack([one.last for one in segments])
    return Segments(tuple(depths), *(_on(device, column) for column in (places, numbers, last)))


def _depth(same: list[_Segment], ends: Column, num_before: int, no_token: int, device: torch.device) -> Depth:
    nothing = np.full(num_before, no_token)
    tokens = np.concatenate([part for one in same for part in (one.before, one.tokens)])
    changing = np.concatenate([part for one in same for part in (nothing, one.tokens)])[num_before:]
    parents = _on(device, [one.parent for one in same])
    return Depth(_on(device, tokens), _on(device, changing), _on(device, ends), torch.as_tensor(ends), parents)


def _cut(seen_until: NDArray[np.int32], num_before: int, short: int) -> Iterator[_Segment]:
    """The segments, in the order of the pack."""
    starts = np.flatnonzero(np.diff(seen_until, prepend=-1))
    path: list[_Segment] = []  # a segment, that which it continues, and so on, from the last
    nothing = np.full(num_before, len(seen_until))
    num_segments: dict[int, int] = {}
    for start, end in zip(starts, [*starts[1:], len(seen_until)], strict=True):
        while path and seen_until[path[-1].own[-1]] <= start:
            path.pop()
        own = tokens = np.arange(start, end)
        depth, parent, before = 0, 0, nothing
        if path and len(path[-1].tokens) <= short:
            tokens = np.concatenate([path[-1].tokens, own])
            depth, parent, before = path[-1].depth, path[-1].parent, path[-1].before
        elif path:
            depth, parent, before = path[-1].depth + 1, path[-1].number, path[-1].last
        number = num_segments[depth] = num_segments.get(depth, -1) + 1
        path.append(_Segment(tokens, own, before, depth, number, parent))
        yield path[-1]


def _on(device: torch.device, numbers: Column | list[int]) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.long).to(device)
