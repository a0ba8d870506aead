"""Groups of examples with given lengths."""

from __future__ import annotations

from itertools import count

from lookonce.train.data.packing import Group


def groups_of(lengths: list[tuple[int, list[int]]]) -> list[Group]:
    """Groups with a prefix and branches of these lengths; examples are numbered consecutively."""
    numbers = count()
    return [
        Group(tuple(next(numbers) for _ in branches), n, prefix, tuple(branches))
        for n, (prefix, branches) in enumerate(lengths)
    ]
