"""The records of a run: every file that is missing and every record that cannot be read, not only the first.

Design: the first records of each file are read, unless all are asked for, so that a check of a million records takes
seconds as well. Which records are selected, and in which lesson each is, can only be judged of all of them; so all are
read if the run file selects or orders them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from lookonce.checks.report import Result
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record, RecordsFile
from lookonce.errors import LookonceError, RecordsError
from lookonce.run.config import RunFile
from lookonce.run.records import SPLITS, for_training, with_contexts, without_fold
from lookonce.text import count, listed, located, shell

NUM_NAMED = 3
"""How many broken records of a file are named."""


@dataclass
class CheckedRecords:
    """Records of a run, by split."""

    by_split: dict[str, list[Record]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    is_complete: bool = True
    """Whether all records were read, and not only the first of each file."""
    readable: dict[str, list[Record]] = field(default_factory=dict)
    """The records of each split without mistakes, before some are left out."""

    def all(self) -> Iterator[Record]:
        return chain.from_iterable(self.by_split.values())

    @property
    def num_records(self) -> int:
        return sum(map(len, self.by_split.values()))

    def images(self) -> dict[Path, str]:
        """Each image with the origin of the first record that shows it."""
        found: dict[Path, str] = {}
        for record in self.all():
            for path in record.images:
                found.setdefault(path, record.origin)
        return found


def check_records(run: RunFile, most: int | None) -> tuple[CheckedRecords, list[Result]]:
    """Read the records of all splits, at most `most` of each file; None for all."""
    records = CheckedRecords()
    results: list[Result] = []
    data = run.data
    is_selective = bool(data.stage_map or data.where or data.held_out or data.context or run.batch.lesson_order)
    most = None if is_selective else most
    for split in SPLITS:
        problems: list[Result] = []
        for path in getattr(data, split):
            problems += _read(run, path, split, records, most, results)
        results += problems
        if records.by_split[split] and not problems:
            records.readable[split] = records.by_split[split]
    if is_selective and not results:
        results += _select(run, records)
    return records, results


def _select(run: RunFile, records: CheckedRecords) -> list[Result]:
    """Select the training records as the run does, and say which are left out."""
    notes: list[str] = []
    try:
        records.by_split = for_training(run, records.by_split, notes.append)
    except LookonceError as error:
        return [_refused(error)]
    return [Result("ok", "records", note) for note in notes]


def check_context(run: RunFile, records: CheckedRecords, keys: Mapping[Path, str]) -> list[Result]:
    """Hold a fold out and give the records their contexts, as training does; `keys` are those of known images."""
    notes: list[str] = []
    images = ImageIndex({**keys}, {})
    try:
        records.by_split = without_fold(run, records.by_split, images, notes.append)
        records.by_split = with_contexts(run, records.by_split, images, notes.append)
    except LookonceError as error:
        return [_refused(error)]
    return [Result("ok", "records", note) for note in notes]


def _refused(error: LookonceError) -> Result:
    value, _, do = str(error).partition("; ")
    return Result("error", "records", value, do)


def count_records(records: CheckedRecords, keys: Mapping[Path, str]) -> Iterator[Result]:
    """The number of records of each split without mistakes, and of images, by their `keys` where these are known."""
    for split, found in records.readable.items():
        num_images = len({keys.get(path, str(path)) for record in found for path in record.images})
        yield Result("ok", "records", f"{split}: {count(len(found), 'record')} about {count(num_images, 'image')}")


def _read(
    run: RunFile, path: Path, split: str, records: CheckedRecords, most: int | None, notes: list[Result]
) -> list[Result]:
    """Read a file; returns what is wrong with it, and adds what is left out to `notes`."""
    broken: list[str] = []
    file = RecordsFile(
        path,
        run.data.image_root,
        format=run.data.format,
        coerce_answers=run.data.coerce_answers,
        broken=lambda origin, error: broken.append(str(error)),
    )
    try:
        found = iter(file)
        records.by_split[split] += islice(found, most)
        records.is_complete &= most is None or next(found, None) is None
    except RecordsError as error:
        broken.append(str(error))
    notes += [Result("ok", "records", note)] if (note := file.note()) else []
    if not path.exists():
        value = f"data.{split}: no records file at {located(path)}"
        return [Result("error", "records", value, f"correct `data.{split}`, or start in the folder of the path")]
    if not broken:
        return []
    value = f"data.{split}: {count(len(broken), 'record')} cannot be read: {listed(broken, NUM_NAMED)}"
    audit = shell("lookonce", "data", "audit", path)
    return [Result("error", "records", value, f"correct them; all are listed by: {audit}")]
