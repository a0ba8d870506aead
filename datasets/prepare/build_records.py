"""From rows to records: clean, split, join duplicates, write, and report the outcome of every row.

Design: rows are split before duplicates are joined, so that an official split by question never merges a training row
with a test row. The split is drawn from all images that were read, whatever the rules leave of their questions, so that
a change of rules does not change the split. If a record was changed, its metadata has the texts before the rules as
`original`: the question and the answer of each row that it was made of.

The report is `report.json`, and a table that is printed. Rows that were read, plus those of augmented variants, equal
the records plus the rows left out, each for one reason; a test checks the sum. Nothing in the report depends on the
time or the machine, so an interrupted preparation ends with the same bytes as an uninterrupted one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.formats.registry import completed
from lookonce.datasets.prepare.definition import Definition, QuestionSection
from lookonce.datasets.prepare.extract import IMAGES
from lookonce.datasets.prepare.rows import (
    PARTS,
    Duplicates,
    Leak,
    RecordRows,
    Row,
    Tally,
    clean,
    families,
    join_duplicates,
    measure_leaks,
    split_by_image,
    split_by_lists,
    text_of,
)
from lookonce.datasets.prepare.sources import Source
from lookonce.datasets.records import Record, Turn, write_records
from lookonce.errors import ImageError, SourceError, UsageError
from lookonce.text import count, in_yaml, listed, nfc, rows, shell, table

NUM_SHOWN = 5
"""How many reasons for missing images are listed."""


@dataclass(frozen=True)
class SplitReport:
    """A split, and how much of val and test is also in train."""

    by: str
    num_records: Mapping[str, int]
    num_images: Mapping[str, int]
    leaks: list[Leak]

    def to_json(self) -> dict[str, Any]:
        return {
            "by": self.by,
            "records": dict(self.num_records),
            "images": dict(self.num_images),
            "leaks": {leak.part: leak.to_json() for leak in self.leaks},
        }


@dataclass(frozen=True)
class Report:
    """The report on a prepared dataset."""

    name: str
    title: str
    licence: str
    homepage: str
    source: Mapping[str, Any]
    columns_left_out: list[str]
    """Columns of the source that the definition does not name."""
    counts: Mapping[str, int]
    """The publishers' numbers of rows and images."""
    num_read: int
    num_variant_rows: int
    num_records: int
    rules: list[Tally]
    duplicates: Duplicates
    problems: Mapping[str, int]
    """The number of rows without an image, for the most frequent reasons."""
    num_without_image: int
    num_in_no_part: int
    """Rows that the split does not assign to a part."""
    num_images: int
    num_names: int
    num_unused: int
    """Images in no record, because the rules have left out all questions about them."""
    num_shared: int
    """Images with several names in the dataset."""
    split: SplitReport
    official: SplitReport | None
    """The official split, if there is one and another was made."""
    num_unknown_questions: int | None
    """Records with a question that the definition does not list; None if it lists no questions."""
    settings: Mapping[str, Any]

    @property
    def left_out(self) -> dict[str, int]:
        """Rows without a record of their own, by reason; together with the records they are all rows."""
        reasons = {tally.name: tally.num_dropped for tally in self.rules if tally.num_dropped}
        reasons["no image"] = self.num_without_image
        reasons["in no part of the split"] = self.num_in_no_part
        reasons["the same as another row"] = self.duplicates.num_identical
        reasons["merged into another row's record"] = self.duplicates.num_merged
        reasons["answered differently by another row"] = self.duplicates.num_dropped
        return {reason: number for reason, number in reasons.items() if number}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "licence": self.licence,
            "homepage": self.homepage,
            "source": dict(self.source),
            "columns_left_out": self.columns_left_out,
            "published": dict(self.counts),
            "rows": {
                "read": self.num_read,
                "of_variants": self.num_variant_rows,
                "records": self.num_records,
                "left_out": self.left_out,
            },
            "rules": [tally.to_json() for tally in self.rules],
            "duplicates": asdict(self.duplicates),
            "images": {
                "written": self.num_images,
                "names": self.num_names,
                "in_no_record": self.num_unused,
                "with_several_names": self.num_shared,
                "not_found": dict(self.problems),
            },
            "split": self.split.to_json(),
            "official_split": self.official.to_json() if self.official else None,
            "questions_not_in_the_definition": self.num_unknown_questions,
            "settings": dict(self.settings),
        }


def report_text(value: Mapping[str, Any]) -> str:
    """A report as text, from its JSON."""
    rules = [(tally["name"], f"{tally['changed']:,}", f"{tally['dropped']:,}") for tally in value["rules"]]
    sections = [
        _head(value),
        table(("rule", "changed", "left out"), rules),
        _rows(value),
        _split(value["split"]),
    ]
    if value["official_split"]:
        sections.append("the official split, for comparison:\n" + _split(value["official_split"]))
    return "\n\n".join(section for section in sections if section)


def _head(value: Mapping[str, Any]) -> str:
    source, images, published = value["source"], value["images"], value["published"]
    numbers = [f"{published[key]:,} {key}" for key in ("rows", "images") if key in published]
    lines = [
        ("licence", value["licence"]),
        ("from", f"{source['place']} ({count(source['num_files'], source['form'] + ' file')})"),
        ("revision", source["revision"] or ""),
        ("not kept", ", ".join(value["columns_left_out"])),
        ("published", ", ".join(numbers)),
        ("images", _images(images)),
        ("not found", "; ".join(f"{reason} ({number:,})" for reason, number in images["not_found"].items())),
    ]
    return f"{value['title'] or value['name']}\n" + rows([line for line in lines if line[1]])


def _images(images: Mapping[str, Any]) -> str:
    text = f"{images['written']:,}"
    if images["with_several_names"]:
        text += f"; {images['with_several_names']:,} of them with several names, {images['names']:,} names in all"
    if images["in_no_record"]:
        text += f"; {images['in_no_record']:,} in no record, because all questions about them were left out"
    return text


def _rows(value: Mapping[str, Any]) -> str:
    numbers = value["rows"]
    lines = [("rows read", numbers["read"])]
    if numbers["of_variants"]:
        lines.append(("rows of augmented variants", numbers["of_variants"]))
    lines += [(reason, -number) for reason, number in numbers["left_out"].items()]
    lines.append(("records", numbers["records"]))
    text = table(("rows", "number"), [(name, f"{number:,}") for name, number in lines])
    unknown = value["questions_not_in_the_definition"]
    return text + (f"\n{count(unknown, 'record')} with questions that the definition does not list" if unknown else "")


def _split(split: Mapping[str, Any]) -> str:
    leaks = split["leaks"]
    lines = []
    for part in PARTS:
        if split["records"].get(part):
            leak = leaks.get(part)
            known = f"{leak['also_in_train']:,} ({leak['share']:.1%})" if leak else ""
            lines.append((part, f"{split['images'][part]:,}", f"{split['records'][part]:,}", known))
    text = table((f"split by {split['by']}", "images", "records", "images also in train"), lines)
    leaking = " and ".join(part for part, leak in leaks.items() if leak["also_in_train"])
    return text + (
        f"\n{leaking} has images that are also in train, so its score says little about new images" if leaking else ""
    )


def next_steps(folder: Path, value: Mapping[str, Any]) -> str:
    """The commands to run next, and the section of the run file."""
    parts = [part for part in PARTS if value["split"]["records"].get(part)]
    files = {part: folder / f"{part}.jsonl" for part in parts}
    keys = [f"  {part}: {in_yaml(file)}" for part, file in files.items()]
    audit = f"{shell('lookonce', 'data', 'audit', folder)}/*.jsonl"
    return "\n".join([f"check it: {audit}", "train on it, with this in a run file:", "data:", *keys])


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
        problems=dict(Counter(_reason(row) for row in cleaned if not row.key).most_common(NUM_SHOWN)),
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
