"""The contexts of training and validation records; an evaluation makes its own (`eval.staged`).

Design: contexts are made when the image keys are known, because they join answers by images and not by paths. So they
are there for training, evaluation and checks, and building a cache needs no answers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TypeVar

from lookonce.datasets.curriculum.context import counted, without_some
from lookonce.datasets.curriculum.given import with_given
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record
from lookonce.run.config import RunFile
from lookonce.run.contexts.origin import trained_on
from lookonce.run.records import RunRecords, without_fold
from lookonce.text import Notify

Opened = TypeVar("Opened", bound=RunRecords)


def in_context(opened: Opened) -> Opened:
    """The same run with contexts and without the held-out fold; how many these are is among its notes.

    Raises:
        RecordsError: answers are missing or wrong, no record is in one of the stages, or there are too few images.
    """
    notes = [*opened.notes]
    records = without_fold(opened.run, opened.records, opened.images, notes.append)
    records = with_contexts(opened.run, records, opened.images, notes.append)
    return replace(opened, records=records, notes=tuple(notes))


def with_contexts(
    run: RunFile, records: dict[str, list[Record]], images: ImageIndex, notify: Notify
) -> dict[str, list[Record]]:
    """The records, those of training and validation with contexts; `notify` gets how many these are.

    Raises:
        RecordsError: answers are missing or wrong, or no record is in one of the stages.
    """
    form = run.data.context
    if form is None:
        return records
    form.check(chain.from_iterable(records.values()))
    found = with_given({split: records[split] for split in ("train", "val")}, form, form.given, images.keys_of)
    found["train"] = without_some(found["train"], form.dropout, run.train.seed, images.keys_of)
    for split, some in found.items():
        if some:
            notify(counted(some, split))
    for path in form.given:
        if note := trained_on(path, found["train"], images):
            notify(note)
    return records | found
