"""From rows to records: clean, split, join duplicates, write, and report the outcome of every row.

Design: rows are split before duplicates are joined, so that an official split by question never merges a training row
with a test row. The split is drawn from all images that were read, whatever the rules leave of their questions, so that
a change of rules does not change the split. If a record was changed, its metadata has the texts before the rules as
`original`: the question and the answer of each row that it was made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.formats.registry import completed
from lookonce.datasets.prepare.definition import Definition, QuestionSection
from lookonce.datasets.prepare.duplicates import Duplicates, RecordRows, join_duplicates
from lookonce.datasets.prepare.journal import IMAGES
from lookonce.datasets.prepare.report import NUM_SHOWN, Report, SplitReport
from lookonce.datasets.prepare.rows import Row, text_of
from lookonce.datasets.prepare.rules import clean
from lookonce.datasets.prepare.sources import Source
from lookonce.datasets.prepare.splits import PARTS, families, measure_leaks, split_by_image, split_by_lists
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import ImageError, SourceError, UsageError
from lookonce.text import listed, nfc

Lists = Mapping[str, Sequence[str]]
"""Names of images by part."""
OFFICIAL = "the set itself"
"""The split of the dataset's publishers, as reports call it."""


@dataclass(frozen=True)
class BuiltRecords:
    """The rows of each record, by part, and the report on them."""

    parts: Mapping[str, list[RecordRows]]
    report: Report


def build_records(
    rows: Sequence[Row],
    columns: Sequence[str],
    definition: Definition,
    source: Source,
    settings: Mapping[str, Any],
    lists: Lists | None = None,
) -> BuiltRecords:
    """Build the records of train, val and test; `columns` are all columns of the source.

    Raises:
        ImageError: no row has an image, or none has a requested variant.
        SourceError: there are no rows, or the rules leave out all of them.
        UsageError: the requested split is impossible.
    """
    if not rows:
        raise SourceError(f"{source.location} has no rows: {listed(source.files)} holds none; is the source complete?")
    rows = with_official_split(rows, definition)
    seen = [row for row in rows if row.key]
    if not seen:
        raise _no_images(rows, definition, source)
    if settings["variants"] and not any(row.variant for row in seen):
        raise ImageError(f"no augmented variant of an image was found; {_looked_for(definition.variants, source)}")
    split = choose_split(seen, definition, lists)
    cleaned, tallies = clean(rows, definition.rules)
    if not cleaned:
        raise SourceError(f"the rules of {definition.name} leave out all {len(rows):,} rows; check them")
    usable = [row for row in cleaned if row.key]
    parts, duplicates = _join(usable, split, definition)
    has_own = split.by != OFFICIAL and any(row.split for row in seen)
    report = Report(
        name=definition.name,
        title=definition.title,
        licence=definition.licence,
        homepage=definition.homepage,
        source=_describe(source),
        columns_left_out=sorted(set(columns) - definition.used_columns),
        counts=definition.counts,
        num_read=sum(not row.variant for row in rows),
        num_variant_rows=sum(bool(row.variant) for row in rows),
        num_records=sum(map(len, parts.values())),
        rules=tallies,
        duplicates=duplicates,
        problems=_problems(cleaned),
        num_without_image=len(cleaned) - len(usable),
        num_in_no_part=sum(not split.part_of(row) for row in usable),
        **_count_images(seen, parts),
        split=_report_split(split, seen, parts),
        official=_report_split(Split(OFFICIAL, _official_part), seen, parts) if has_own else None,
        num_unknown_questions=_count_unknown(parts, definition),
        settings=settings,
    )
    return BuiltRecords(parts, report)


def write_parts(folder: Path, built: BuiltRecords, definition: Definition) -> None:
    """Write a records file for each part that has records."""
    for part, rows_of_records in built.parts.items():
        if rows_of_records:
            records = (make_record(rows, folder / IMAGES, definition) for rows in rows_of_records)
            named = (completed(record, lambda name: folder / IMAGES / Path(name).name) for record in records)
            write_records(folder / f"{part}.jsonl", named)


def make_record(rows: RecordRows, images: Path, definition: Definition) -> Record:
    """The record of some rows with the same image and question."""
    first = rows[0]
    known = definition.questions.get(nfc(first.question), QuestionSection())
    found = {"img_id": first.image_id, "category": known.category, "stage": known.stage}
    metadata = {name: value for name, value in found.items() if value not in ("", None)} | dict(first.metadata)
    metadata |= {"official_split": first.split} if first.split else {}
    metadata |= {"variant": first.variant} if first.variant else {}
    if len(rows) > 1:
        metadata["references"] = [row.answer for row in rows]
    if len(rows) > 1 or first.read_as:
        pairs = [row.as_read for row in rows]
        metadata["original"] = [{"question": question, "answer": answer} for question, answer in pairs]
    turn = Turn(first.question, first.answer)
    return Record((images / first.image,), (turn,), metadata=metadata, origin=first.origin)


# Parts.


@dataclass(frozen=True)
class Split:
    """A split: `part_of` returns the part of a row, or an empty text."""

    by: str
    part_of: Callable[[Row], str]


def _official_part(row: Row) -> str:
    return row.split


def with_official_split(rows: Sequence[Row], definition: Definition) -> Sequence[Row]:
    """The rows with their official split, if a metadata column says it."""
    section = definition.split.official
    if section is None:
        return rows
    part_of = {value: part for part in PARTS for value in getattr(section, part)}
    return [replace(row, split=part_of.get(nfc(text_of(row.metadata.get(section.column))), "")) for row in rows]


def choose_split(rows: Sequence[Row], definition: Definition, lists: Lists | None) -> Split:
    """The requested split of rows with images.

    Raises:
        UsageError: it is impossible.
    """
    split = definition.split
    if lists is not None:
        of_name = split_by_lists({row.image_id for row in rows}, lists)
        if not any(of_name.values()):
            known = ", ".join(sorted(of_name)[:3])
            raise UsageError(f"no image of {definition.name} is in the lists of --split; expected names like {known}")
        return Split("lists", lambda row: of_name[row.image_id])
    if split.by == "official":
        if not any(row.split for row in rows):
            raise UsageError(
                f"the official split of {definition.name} is not in this source: expected a column "
                f"{' or '.join(definition.columns.split)}, or files called train, val and test; --split image draws a "
                "split"
            )
        return Split(OFFICIAL, _official_part)
    of_key = split_by_image(rows, split.shares.model_dump(), split.seed, split.together)
    return Split(f"image, seed {split.seed}", lambda row: of_key[row.key])


def _join(rows: Sequence[Row], split: Split, definition: Definition) -> tuple[dict[str, list[RecordRows]], Duplicates]:
    """The rows of each record, by part, and the duplicates in all parts together."""
    parts: dict[str, list[RecordRows]] = {}
    found = []
    for part in PARTS:
        mine = [row for row in rows if split.part_of(row) == part]
        parts[part], duplicates = join_duplicates(mine, definition.duplicates)
        found.append(duplicates)
    names = [field.name for field in fields(Duplicates) if field.name != "policy"]
    sums = {name: sum(getattr(one, name) for one in found) for name in names}
    return parts, Duplicates(definition.duplicates, **sums)


# The report.


def _report_split(split: Split, rows: Sequence[Row], built: Mapping[str, Sequence[RecordRows]]) -> SplitReport:
    """The images of all rows, and the records, by the parts of this split."""
    asked = [of_record[0] for part in PARTS for of_record in built[part]]
    parts = [split.part_of(row) for row in asked]
    images = {part: {row.key for row in rows if split.part_of(row) == part} for part in PARTS}
    return SplitReport(
        by=split.by,
        num_records={part: parts.count(part) for part in PARTS},
        num_images={part: len(images[part]) for part in PARTS},
        leaks=measure_leaks([row.key for row in asked], parts, families(rows)),
    )


def _describe(source: Source) -> dict[str, Any]:
    return {
        "place": source.location,
        "form": source.format,
        "revision": source.revision,
        "licence": source.licence,
        "num_files": len(source.files),
        "num_bytes": sum(source.sizes),
        "files_left_alone": list(source.ignored),
    }


def _problems(rows: Iterable[Row]) -> dict[str, int]:
    """The number of rows without an image, for the most frequent reasons."""
    reasons = Counter(_reason(row) for row in rows if not row.key)
    return dict(reasons.most_common(NUM_SHOWN))


def _reason(row: Row) -> str:
    return f"{row.problem}: {row.image_id}" if row.image_id else f"{row.problem} ({row.origin})"


def _count_images(rows: Iterable[Row], parts: Mapping[str, Sequence[RecordRows]]) -> dict[str, int]:
    names_of: dict[str, set[str]] = {}
    for row in rows:
        if not row.variant:
            names_of.setdefault(row.key, set()).add(row.image_id)
    keys = {row.key for row in rows}
    return {
        "num_images": len(keys),
        "num_unused": len(keys - {of_record[0].key for part in parts.values() for of_record in part}),
        "num_names": len({name for names in names_of.values() for name in names if name}),
        "num_shared": sum(len(names) > 1 for names in names_of.values()),
    }


def _count_unknown(parts: Mapping[str, Sequence[RecordRows]], definition: Definition) -> int | None:
    if not definition.questions:
        return None
    return sum(nfc(rows[0].question) not in definition.questions for part in parts.values() for rows in part)


def _no_images(rows: Sequence[Row], definition: Definition, source: Source) -> ImageError:
    return ImageError(
        f"no row has an image; {len(rows):,} were tried, the first: {_reason(rows[0])}\n"
        f"{_looked_for(definition.image_patterns, source)}"
    )


def _looked_for(patterns: Sequence[str], source: Source) -> str:
    roots = ", ".join(map(str, source.image_roots))
    return f"searched for {', '.join(patterns)} in {roots}; name the folder of the images with --image-root"
