"""Leave the records about a part of the images out of training, so that a model can answer about images it never saw.

Design: a fold is one of several parts of the images, of equal size to one image. They are images and not records, and
known by their keys: two paths with the same bytes are in one fold, and so are images that one record shows together.
The folds follow from the seed and the images alone, so the trainings that leave out one fold each need not know of each
other. Records without images are in no fold: all trainings have them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from lookonce.datasets.curriculum.context import Keys, KeysOf
from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError
from lookonce.settings import Section
from lookonce.text import count


class Fold(Section):
    """One of several parts of the training images."""

    fold: Annotated[int, Field(ge=1, le=1_000_000)]
    """The number of the part that is left out, from 1."""
    of: Annotated[int, Field(ge=2, le=1_000_000)]
    """The number of parts."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Fold:
        if self.fold > self.of:
            raise ValueError(f"the folds of {self.of} are 1 to {self.of} (got fold {self.fold})")
        return self


def hold_out(records: Sequence[Record], fold: Fold, seed: int, keys_of: KeysOf) -> tuple[list[Record], list[Record]]:
    """The records that are trained on, and those about the images of the fold, both in their order.

    Raises:
        RecordsError: there are fewer images than folds.
    """
    keys = [keys_of(record) for record in records]
    group_of = _together(keys)
    order = sorted(set(group_of.values()))
    if len(order) < fold.of:
        raise RecordsError(
            f"`data.held_out`: {count(len(order), 'image')} cannot be divided into {fold.of} folds; images that a "
            "record shows together are in one fold"
        )
    # A string seed is hashed with sha512, so the order is the same in every process.
    random.Random(f"seed {seed}, folds of images").shuffle(order)
    left_out = {group for place, group in enumerate(order) if place % fold.of == fold.fold - 1}
    found: tuple[list[Record], list[Record]] = ([], [])
    for record, some in zip(records, keys, strict=True):
        found[bool(some) and group_of[some[0]] in left_out].append(record)
    return found


def _together(keys: Iterable[Keys]) -> dict[str, str]:
    """The smallest key of all images that are shown together with an image, by its key."""
    parent: dict[str, str] = {}

    def find(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]
        return key

    for first, *others in filter(None, keys):
        for other in (first, *others):
            smaller, larger = sorted((find(first), find(other)))
            parent[larger] = smaller
    return {key: find(key) for key in parent}
