"""From rows to records: clean, split, join, write, and say what became of every row.

Design: rows are put into parts before duplicates are joined, so that a set's own split by question never merges a
training row with a test row. The split is drawn from all images that were read, whatever the rules leave of their
questions, so that other rules are not another split. What a record was before the rules stands in its metadata as
`original`, a list with the question and the answer of each row that it was made of; it is left out where nothing was
changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.definition import Definition, QuestionSection
from lookonce.datasets.prepare.duplicates import Duplicates, Group, join_duplicates
from lookonce.datasets.prepare.journal import IMAGES
from lookonce.datasets.prepare.report import NUM_SHOWN, Report, SplitReport
from lookonce.datasets.prepare.rows import Row, text_of
from lookonce.datasets.prepare.rules import clean
from lookonce.datasets.prepare.sources import Source
from lookonce.datasets.prepare.splits import PARTS, families, measure_leaks, split_by_image, split_by_lists
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import ImageError, SourceError, UsageError

Lists = Mapping[str, Sequence[str]]
"""Names of images by part."""
OFFICIAL = "the set itself"


@dataclass(frozen=True)
class Composed:
    """The records of a set, by part, and what is to be told of them."""

    groups: Mapping[str, list[Group]]
    report: Report


def compose(
    rows: Sequence[Row],
    columns: Sequence[str],
    definition: Definition,
    source: Source,
    settings: Mapping[str, Any],
    lists: Lists | None = None,
) -> Composed:
    """Put rows into records and parts; `columns` are all that the source has.

    Raises:
        ImageError: no row has an image, or none has a variant that was asked for.
        SourceError: the rules have left no row.
        UsageError: the split that was asked for can not be made.
    """
    rows = with_official_parts(rows, definition)
    seen = [row for row in rows if row.key]
    if not seen:
        raise _no_images(rows, definition, source)
    if settings["variants"] and not any(row.variant for row in seen):
        raise ImageError(f"no transformed variant of an image was found; {_looked_for(definition.variants, source)}")
    split = draw(seen, definition, lists)
    cleaned, tallies = clean(rows, definition.rules)
    if not cleaned:
        raise SourceError(f"the rules of {definition.name} have left out all {len(rows):,} rows; does its YAML fit?")
    usable = [row for row in cleaned if row.key]
    groups, duplicates = _join(usable, split, definition)
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
        num_records=sum(map(len, groups.values())),
        rules=tallies,
        duplicates=duplicates,
        problems=_problems(cleaned),
        num_without_image=len(cleaned) - len(usable),
        num_in_no_part=sum(not split.part_of(row) for row in usable),
        **_count_images(seen, groups),
        split=_report_split(split, seen, groups),
        official=_report_split(Split(OFFICIAL, _own_part), seen, groups) if has_own else None,
        num_unknown_questions=_count_unknown(groups, definition),
        settings=settings,
    )
    return Composed(groups, report)


def write_parts(folder: Path, composed: Composed, definition: Definition) -> None:
    """Write a records file for each part that has records."""
    for part, groups in composed.groups.items():
        if groups:
            records = (make_record(group, folder / IMAGES, definition) for group in groups)
            write_records(folder / f"{part}.jsonl", records)


def make_record(group: Group, images: Path, definition: Definition) -> Record:
    """The record of some rows that ask the same of the same image."""
    first = group[0]
    known = definition.questions.get(first.question, QuestionSection())
    found = {"img_id": first.image_id, "category": known.category, "stage": known.stage}
    metadata = {name: value for name, value in found.items() if value not in ("", None)} | dict(first.metadata)
    metadata |= {"official_split": first.split} if first.split else {}
    metadata |= {"variant": first.variant} if first.variant else {}
    if len(group) > 1:
        metadata["references"] = [row.answer for row in group]
    if len(group) > 1 or first.read_as:
        pairs = [row.as_read for row in group]
        metadata["original"] = [{"question": question, "answer": answer} for question, answer in pairs]
    return Record((images / first.image,), (Turn(first.question, first.answer),), metadata=metadata)


# Parts.


@dataclass(frozen=True)
class Split:
    """A way to say which part a row is in; empty for none."""

    by: str
    part_of: Callable[[Row], str]


def _own_part(row: Row) -> str:
    return row.split


def with_official_parts(rows: Sequence[Row], definition: Definition) -> Sequence[Row]:
    """The rows with the part into which the set itself puts them, where a column of metadata says it."""
    section = definition.split.official
    if section is None:
        return rows
    part_of = {value: part for part in PARTS for value in getattr(section, part)}
    return [replace(row, split=part_of.get(text_of(row.metadata.get(section.column)), "")) for row in rows]


def draw(rows: Sequence[Row], definition: Definition, lists: Lists | None) -> Split:
    """The split that was asked for, of rows with images.

    Raises:
        UsageError: it can not be made.
    """
    split = definition.split
    if lists is not None:
        of_name = split_by_lists({row.image_id for row in rows}, lists)
        if not any(of_name.values()):
            known = ", ".join(sorted(of_name)[:3])
            raise UsageError(f"no image of {definition.name} is in the lists of --split; they are called {known}, ...")
        return Split("lists", lambda row: of_name[row.image_id])
    if split.by == "official":
        if not any(row.split for row in rows):
            raise UsageError(
                f"what was read does not say which part of {definition.name}'s own split a row is in: expected a "
                f"column {' or '.join(definition.columns.split)}, or files called train, val and test; --split image "
                "draws one"
            )
        return Split(OFFICIAL, _own_part)
    of_key = split_by_image(rows, split.shares.model_dump(), split.seed, split.together)
    return Split(f"image, seed {split.seed}", lambda row: of_key[row.key])


def _join(rows: Sequence[Row], split: Split, definition: Definition) -> tuple[dict[str, list[Group]], Duplicates]:
    """The rows of each record, by part, and what was found double in all parts together."""
    groups: dict[str, list[Group]] = {}
    found = []
    for part in PARTS:
        mine = [row for row in rows if split.part_of(row) == part]
        groups[part], duplicates = join_duplicates(mine, definition.duplicates)
        found.append(duplicates)
    names = [field.name for field in fields(Duplicates) if field.name != "policy"]
    sums = {name: sum(getattr(one, name) for one in found) for name in names}
    return groups, Duplicates(definition.duplicates, **sums)


# What is told.


def _report_split(split: Split, rows: Sequence[Row], groups: Mapping[str, Sequence[Group]]) -> SplitReport:
    """Images of all rows, and questions that are records, by the part that this split puts them into."""
    asked = [group[0] for part in PARTS for group in groups[part]]
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
        "place": source.place,
        "form": source.form,
        "revision": source.revision,
        "licence": source.licence,
        "num_files": len(source.files),
        "num_bytes": sum(source.sizes),
        "files_left_alone": list(source.left),
    }


def _problems(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows have no image, by the reason; the first few reasons."""
    reasons = Counter(_reason(row) for row in rows if not row.key)
    return dict(reasons.most_common(NUM_SHOWN))


def _reason(row: Row) -> str:
    return f"{row.problem}: {row.image_id}" if row.image_id else f"{row.problem} ({row.origin})"


def _count_images(rows: Iterable[Row], groups: Mapping[str, Sequence[Group]]) -> dict[str, int]:
    names_of: dict[str, set[str]] = {}
    for row in rows:
        if not row.variant:
            names_of.setdefault(row.key, set()).add(row.image_id)
    keys = {row.key for row in rows}
    return {
        "num_images": len(keys),
        "num_unused": len(keys - {group[0].key for part in groups.values() for group in part}),
        "num_names": len({name for names in names_of.values() for name in names if name}),
        "num_shared": sum(len(names) > 1 for names in names_of.values()),
    }


def _count_unknown(groups: Mapping[str, Sequence[Group]], definition: Definition) -> int | None:
    if not definition.questions:
        return None
    return sum(group[0].question not in definition.questions for part in groups.values() for group in part)


def _no_images(rows: Sequence[Row], definition: Definition, source: Source) -> ImageError:
    return ImageError(
        f"no row has an image; {len(rows):,} tried, the first: {_reason(rows[0])}\n"
        f"{_looked_for(definition.images, source)}"
    )


def _looked_for(patterns: Sequence[str], source: Source) -> str:
    roots = ", ".join(map(str, source.image_roots))
    return f"looked for {', '.join(patterns)} in {roots}; say with --image-root where images are"
