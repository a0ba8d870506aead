"""From a source to a journal of rows and a folder of images, chunk by chunk.

Design: one pass. An embedded image is written when its row is read; an image file is found by its row and read once. A
row whose image is not found is kept with the reason, so that it is counted like all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.datasets.formats.checks import check_values
from lookonce.datasets.image_suffixes import without_suffix
from lookonce.datasets.prepare.chunks import Chunk, RawRow
from lookonce.datasets.prepare.definition import Definition
from lookonce.datasets.prepare.images import ImageStore, Stored
from lookonce.datasets.prepare.journal import Journal
from lookonce.datasets.prepare.lookup import ImageFinder
from lookonce.datasets.prepare.rows import Row, text_of
from lookonce.datasets.prepare.sources import Source
from lookonce.datasets.prepare.splits import part_of
from lookonce.errors import ImageError, RecordsError
from lookonce.text import nfc, value_of

NO_IMAGE = "no image was found"


def extract(source: Source, definition: Definition, num_variants: int, journal: Journal) -> None:
    """Read all chunks that the journal lacks."""
    num_done, images, files = journal.done()
    finder = ImageFinder(source.image_roots, definition.image_patterns)
    with ImageStore(journal.images, images) as store:
        extraction = Extraction(definition, finder, store, num_variants, files)
        for number, (part, chunk) in enumerate(_with_progress(source, definition)):
            if number >= num_done:
                known, before = store.num_images, set(files)
                rows = extraction.read(chunk, part)
                store.finish()
                new_files = {name: files[name] for name in files.keys() - before}
                journal.write(number, rows, store.since(known), dict(sorted(new_files.items())), extraction.columns)


def _with_progress(source: Source, definition: Definition) -> Iterator[tuple[str, Chunk]]:
    """The chunks of a source, with a progress bar of rows; only parquet files know their total in advance."""
    chunks: Iterable[tuple[str, Chunk]] = source.chunks(definition)
    total = None
    if source.format == "parquet":
        chunks = list(chunks)
        total = sum(chunk.num_rows or 0 for _, chunk in chunks)
    with tqdm(desc=f"read {source.format}", total=total, unit="row", leave=False, disable=None) as progress:
        for part, chunk in chunks:
            yield part, chunk
            progress.update(chunk.num_rows or 0)


@dataclass
class _Draft:
    """A row whose image may still have to be read."""

    row: Row
    path: Path | None = None


@dataclass
class Extraction:
    """Turns the rows of files into rows with images."""

    definition: Definition
    finder: ImageFinder
    store: ImageStore
    num_variants: int
    files: dict[str, Stored]
    """The image of each file of the source that was read."""
    unreadable: dict[str, str] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    """The columns of all rows so far."""

    def read(self, chunk: Chunk, part: str) -> list[Row]:
        """The rows of a chunk; their images are written or in the queue."""
        drafts = list(itertools.chain.from_iterable(self._drafts(raw, part) for raw in chunk.read()))
        self._store_files(drafts)
        return [self._finish(draft) for draft in drafts]

    def _drafts(self, raw: RawRow, part: str) -> Iterator[_Draft]:
        """The row itself, and one for each augmented variant of its image that is found."""
        columns, values = self.definition.columns, raw.values
        self.columns |= values.keys()
        image = text_of(_first(values, columns.names("image"))).strip()
        image_id = text_of(_first(values, columns.names("image_id"))).strip()
        if not image_id and raw.image is None:
            image_id = without_suffix(image)
        named = {**values, "image": image, "image_id": image_id}
        row = Row(
            question=text_of(_wanted(raw, columns.names("question"), "question")),
            answer=text_of(_wanted(raw, columns.names("answer"), "answer")),
            key="",
            image_id=image_id,
            split=part_of(text_of(_first(values, columns.split))) or part,
            metadata=self._metadata(values),
            origin=raw.origin,
        )
        texts = {"question": row.question, "answer": row.answer, "image_id": image_id, "image": image}
        check_values(dict.fromkeys(values) | texts | dict(row.metadata), raw.origin)
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
    """The value of the first of these columns that the row has."""
    return next((value_of(values, name) for name in names if _has(values, name)), None)


def _has(values: Mapping[str, Any], name: str) -> bool:
    return name in values or (not name.isascii() and nfc(name) in map(nfc, values))


def _wanted(raw: RawRow, names: Sequence[str], what: str) -> Any:
    if not any(_has(raw.values, name) for name in names):
        raise RecordsError(
            f"{raw.origin}: expected a column {' or '.join(f'`{name}`' for name in names)}, got {sorted(raw.values)}; "
            f"name it in the dataset's YAML file: columns: {{{what}: NAME}}"
        )
    return _first(raw.values, names)


def _stem(row: Row, file_name: str) -> str:
    """The preferred file name of a row's image."""
    stem = (row.image_id or file_name).rpartition("/")[2]
    return f"{stem}-variant-{row.variant}" if row.variant else stem
