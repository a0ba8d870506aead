"""From a source to a journal of rows and a folder of images, portion by portion.

Design: one pass. An embedded image is written as its row goes by; image files are looked for by their rows, and each
that is new is read once. A row whose image is not found is kept with the reason, so that it is counted like all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.datasets.prepare.chunks import Portion, RawRow
from lookonce.datasets.prepare.definition import Definition
from lookonce.datasets.prepare.images import ImageStore, Stored
from lookonce.datasets.prepare.journal import Journal
from lookonce.datasets.prepare.lookup import ImageFinder
from lookonce.datasets.prepare.rows import Row, text_of
from lookonce.datasets.prepare.sources import Source
from lookonce.datasets.prepare.splits import ENDING, part_of
from lookonce.errors import ImageError, RecordsError

NO_IMAGE = "no image was found"


def extract(source: Source, definition: Definition, num_variants: int, journal: Journal) -> None:
    """Read all portions that the journal lacks."""
    num_done, images, files = journal.done()
    finder = ImageFinder(source.image_roots, definition.images)
    with ImageStore(journal.images, images) as store:
        extraction = Extraction(definition, finder, store, num_variants, files)
        for number, (part, portion) in enumerate(_shown(source, definition)):
            if number >= num_done:
                known, before = store.num_images, set(files)
                rows = extraction.read(portion, part)
                store.finish()
                new_files = {name: files[name] for name in files.keys() - before}
                journal.write(number, rows, store.since(known), dict(sorted(new_files.items())), extraction.columns)


def _shown(source: Source, definition: Definition) -> Iterator[tuple[str, Portion]]:
    """The portions of a source, with a bar of their rows; how many there are in all, parquet files say beforehand."""
    portions: Iterable[tuple[str, Portion]] = source.portions(definition)
    total = None
    if source.form == "parquet":
        portions = list(portions)
        total = sum(portion.num_rows or 0 for _, portion in portions)
    with tqdm(desc=f"read {source.form}", total=total, unit="row", leave=False, disable=None) as progress:
        for part, portion in portions:
            yield part, portion
            progress.update(portion.num_rows or 0)


@dataclass
class _Draft:
    """A row whose image may still have to be read."""

    row: Row
    path: Path | None = None


@dataclass
class Extraction:
    """Makes rows of what readers give."""

    definition: Definition
    finder: ImageFinder
    store: ImageStore
    num_variants: int
    files: dict[str, Stored]
    """Which image is which file of the source; grows."""
    unreadable: dict[str, str] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    """All that rows had."""

    def read(self, portion: Portion, part: str) -> list[Row]:
        """The rows of a portion, their images written or soon to be."""
        drafts = list(itertools.chain.from_iterable(self._drafts(raw, part) for raw in portion.read()))
        self._store_files(drafts)
        return [self._finish(draft) for draft in drafts]

    def _drafts(self, raw: RawRow, part: str) -> Iterator[_Draft]:
        """The row itself, and one for each transformed variant of its image that is there."""
        columns, values = self.definition.columns, raw.values
        self.columns |= values.keys()
        image = text_of(_first(values, columns.image)).strip()
        image_id = text_of(_first(values, columns.image_id)).strip()
        if not image_id and raw.image is None:
            image_id = ENDING.sub("", image)
        named = {**values, "image": image, "image_id": image_id}
        row = Row(
            question=text_of(_wanted(raw, columns.question, "question")),
            answer=text_of(_wanted(raw, columns.answer, "answer")),
            key="",
            image_id=image_id,
            split=part_of(text_of(_first(values, columns.split))) or part,
            metadata=self._metadata(values),
            origin=raw.origin,
        )
        if raw.image is not None:
            yield _Draft(self._with_image(row, self.store.add(raw.image, _stem(row, image))))
        else:
            yield self._look_up(row, named, None)
        for number in range(1, self.num_variants + 1):
            variant = replace(row, variant=str(number))
            draft = self._look_up(variant, named | {"variant": number}, self.definition.variants)
            if draft.path:
                yield draft

    def _look_up(self, row: Row, named: Mapping[str, Any], patterns: list[str] | None) -> _Draft:
        path = self.finder.find(named, patterns)
        return _Draft(row, path) if path else _Draft(replace(row, problem=NO_IMAGE))

    def _metadata(self, values: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {name: _first(values, names) for name, names in self.definition.columns.metadata.items()}
        return {name: value for name, value in chosen.items() if value is not None and value != ""}

    def _store_files(self, drafts: Iterable[_Draft]) -> None:
        first: dict[Path, Row] = {}
        for draft in drafts:
            if draft.path and str(draft.path) not in self.files:
                first.setdefault(draft.path, draft.row)
        for path, data in self.finder.read(first):
            if isinstance(data, ImageError):
                self.unreadable[str(path)] = str(data)
            else:
                self.files[str(path)] = self.store.add(data, _stem(first[path], path.name))

    def _finish(self, draft: _Draft) -> Row:
        if draft.path is None:
            return draft.row
        stored = self.files.get(str(draft.path))
        if stored is None:
            return replace(draft.row, problem=self.unreadable[str(draft.path)])
        return self._with_image(draft.row, stored)

    @staticmethod
    def _with_image(row: Row, stored: Stored) -> Row:
        return replace(row, key=stored.key, image=stored.name)


def _first(values: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these columns that there is."""
    return next((values[name] for name in names if name in values), None)


def _wanted(raw: RawRow, names: list[str], what: str) -> Any:
    if not any(name in raw.values for name in names):
        raise RecordsError(
            f"{raw.origin}: expected a column {' or '.join(f'`{name}`' for name in names)}, got {sorted(raw.values)}; "
            f"say in the set's YAML file what it is called: columns: {{{what}: NAME}}"
        )
    return _first(raw.values, names)


def _stem(row: Row, file_name: str) -> str:
    """What to call the file of a row's image."""
    stem = (row.image_id or file_name).rpartition("/")[2]
    return f"{stem}-variant-{row.variant}" if row.variant else stem
