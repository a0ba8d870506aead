"""A pack cut into segments, in the order in which a state runs through them.

A pack is a tree in depth-first order. A segment is a part without branches: it begins where `seen_until` changes, that
is behind a token that also something later continues, or that nothing more does. So a token of a segment continues the
one before it, and its first token continues the last one of another segment, or nothing.

Design: segments of one depth are rows of equal length, so that a state takes as many calls as there are depths, two or
a few. A row begins with some tokens before the segment, for computations that look back over them. It is worked out on
the CPU, some microseconds a segment; a GPU has to hand over `seen_until`, once a pack.

Shapes: `L` tokens of the pack with padding, `N` segments of a depth, `B` tokens before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Column = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The segments of one depth."""

    tokens: torch.Tensor
    """`[N, B + longest]`: indices of the tokens before each segment and of its own, then padding; `L` is no token."""
    parents: torch.Tensor
    """`[N]`: the row, of the depth before, of the segment that each continues; 0 if it continues none."""


@dataclass(frozen=True)
class Segments:
    """All segments of a pack."""

    depths: tuple[Rows, ...]
    """First those that continue nothing."""
    places: torch.Tensor
    """`[L]`: where a token's result is if the rows of all depths are laid end to end, without the tokens before."""
    numbers: torch.Tensor
    """`[L]`: the row of a token's segment, counted through the rows of all depths."""
    last: torch.Tensor
    """`[rows of all depths, B]`: the last tokens of each segment, after those before it; `L` is no token."""


class _Segment(NamedTuple):
    tokens: Column
    before: Column
    last: Column
    """`[B]` each: the tokens before the first one, and the last ones up to the end; `L` where there is no token."""
    depth: int
    row: int
    """Its number among those of its depth."""
    parent: int
    """The row of the segment that it continues; 0 for none."""


def segments_of(seen_until: torch.Tensor, num_before: int) -> Segments:
    """The segments of a pack, with `num_before` tokens before each. `seen_until` is `[L]`."""
    segments = sorted(_cut(seen_until.cpu().numpy(), num_before), key=lambda one: one.depth)
    depths, begin = [], 0
    places, numbers = (np.empty(len(seen_until), dtype=np.int64) for _ in range(2))
    for number, one in enumerate(segments):
        numbers[one.tokens] = number
    for _, members in groupby(segments, key=lambda one: one.depth):
        same = list(members)
        longest = max(len(one.tokens) for one in same)
        tokens = np.full((len(same), num_before + longest), len(seen_until))
        for one in same:
            tokens[one.row, : num_before + len(one.tokens)] = np.concatenate([one.before, one.tokens])
            places[one.tokens] = begin + one.row * longest + np.arange(len(one.tokens))
        begin += len(same) * longest
        depths.append(Rows(*(_on(seen_until.device, column) for column in (tokens, [one.parent for one in same]))))
    last = np.stack([one.last for one in segments])
    return Segments(tuple(depths), *(_on(seen_until.device, column) for column in (places, numbers, last)))


def _cut(seen_until: NDArray[np.int32], num_before: int) -> Iterator[_Segment]:
    """The segments, in the order of the pack."""
    starts = np.flatnonzero(np.diff(seen_until, prepend=-1))
    path: list[_Segment] = []  # a segment, that which it continues, and so on, from the last
    nothing = np.full(num_before, len(seen_until))
    num_rows: dict[int, int] = {}
    for start, end in zip(starts, [*starts[1:], len(seen_until)], strict=True):
        while path and seen_until[path[-1].tokens[-1]] <= start:
            path.pop()
        depth, tokens = len(path), np.arange(start, end)
        before, parent = (path[-1].last, path[-1].row) if path else (nothing, 0)
        row = num_rows[depth] = num_rows.get(depth, -1) + 1
        last = np.concatenate([before, tokens])[len(tokens) :]
        path.append(_Segment(tokens, before, last, depth, row, parent))
        yield path[-1]


def _on(device: torch.device, numbers: Column | list[int]) -> torch.Tensor:
    return torch.as_tensor(numbers, dtype=torch.long).to(device)
