"""Select training records by their metadata, or a seeded share of them; count and name those that are left out.

Design: a record is selected if each field has one of the given values. Of these records, the share is the first part of
one random order that follows from the seed and the number of all training records. So shares are nested: those of 0.384
are among those of 0.694, and a set that grows by phases never loses a record. The share is one of records and not of
images, so that the random sets beside a curriculum differ from its stages in nothing but the choice: a stage too has
some questions about nearly every image.

What is left out can be selected from again (`data.replay`), by the same rules and in the same random order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import ConfigDict, Field

from lookonce.datasets.curriculum.values import Values, as_text, counted, named, texts_of
from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError
from lookonce.settings import Section
from lookonce.text import Notify, count, listed, quiet


class Selection(Section):
    """Values of metadata fields, and a share of the records that have them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Values]
    share: Annotated[float, Field(gt=0, le=1)] = 1
    """How many of the records that have the values are selected. All other keys are metadata fields."""

    @property
    def fields(self) -> dict[str, Values]:
        """The values that each field may have."""
        return self.__pydantic_extra__


class _Choice:
    """A selection that is applied to some of the training records, which it takes in a random order."""

    def __init__(self, records: Sequence[Record], seed: int) -> None:
        self.records = records
        order = list(range(len(records)))
        # A string seed is hashed with sha512, so the order is the same in every process.
        random.Random(f"seed {seed}, share of records").shuffle(order)
        self._place = {index: place for place, index in enumerate(order)}

    def select(self, indices: Sequence[int], wanted: Selection, key: str) -> tuple[list[int], dict[int, str]]:
        """The indices that are selected, in order, and why each of the others is not."""
        self._check(indices, wanted, key)
        fields = {field: frozenset(map(as_text, values)) for field, values in wanted.fields.items()}
        why = {index: _misfit(self.records[index], fields) for index in indices}
        fitting = sorted((index for index in indices if not why[index]), key=self._place.__getitem__)
        if not fitting:
            raise RecordsError(f"`{key}` leaves no record: each field must have one of its values; write fewer fields")
        num_selected = max(round(wanted.share * len(fitting)), 1)
        why |= dict.fromkeys(fitting[num_selected:], f"not in the share of {wanted.share:g}")
        return sorted(fitting[:num_selected]), {index: reason for index, reason in why.items() if reason}

    def _check(self, indices: Iterable[int], wanted: Selection, key: str) -> None:
        """Check that some record has each of the values."""
        records = [self.records[index] for index in indices]
        for field, values in wanted.fields.items():
            found = {text for record in records for text in texts_of(record, field)}
            unknown = [text for text in map(as_text, values) if text not in found]
            if not found:
                known = sorted({name for record in records for name in record.metadata})
                raise RecordsError(f"`{key}`: no record has the field {field}; {_known('fields', known)}")
            if unknown:
                raise RecordsError(f"`{key}`: no record has {field} {unknown[0]}; {_known('values', sorted(found))}")


def _known(what: str, names: Sequence[str]) -> str:
    return f"{what} are {listed(names, 10)}" if names else "records have no metadata; `data.stage_map` gives them some"


def _misfit(record: Record, fields: Mapping[str, frozenset[str]]) -> str:
    """The first field without one of its values, such as "stage 2"; empty if there is none."""
    for field, values in fields.items():
        if values.isdisjoint(texts_of(record, field)):
            return named(record, field)
    return ""


def select_training(
    records: Sequence[Record], where: Selection, replay: Selection | None, seed: int, notify: Notify = quiet
) -> list[Record]:
    """The records that `where` selects, and those that `replay` selects of the others, in their order.

    `notify` gets the number of those that are left out, and of those that are replayed, by the value that decided.

    Raises:
        RecordsError: no record has a field or value, or none is left.
    """
    choice = _Choice(records, seed)
    selected, left_out = choice.select(range(len(records)), where, "data.where")
    total = count(len(records), "train record")
    if left_out:
        notify(f"`data.where` leaves out {len(left_out):,} of {total}: {counted(left_out.values())}")
    if replay:
        if not left_out:
            raise RecordsError("`data.where` leaves no record out, so `data.replay` has none to select; remove it")
        again, _ = choice.select(sorted(left_out), replay, "data.replay")
        notify(f"`data.replay` trains on {len(again):,} of them: {counted(left_out[index] for index in again)}")
        selected = sorted(selected + again)
    return [records[index] for index in selected]
