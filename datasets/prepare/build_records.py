"""From rows to records: clean, split, join duplicates, write, and report the outcome of every row.

Design: rows are split before duplicates are joined, so that an official split by question never merges a training row
with a test row. The split is drawn from all images that were read, whatever the rules leave of their questions, so that
a change of rules does not change the split. If a record was changed, its metadata has the texts before the rules as
`original`: the question and the answer of each row that it was made of.

The report is `report.json`, and a table that is printed. Rows that were read, plus those of augmented variants, equal
the records plus the rows left out, each for one reason; a test checks the sum. Nothing in the report depends on the
time or the machine, so a preparation that was interrupted and run again ends with the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.formats.registry import completed
from lookonce.datasets.prepare.definition import Definition, QuestionSection
from lookonce.datasets.prepare.rows import (
    DUPLICATES,
    PARTS,
    RecordRows,
    Row,
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
IMAGES = "images"
"""The folder of the images beside the records."""
Lists = Mapping[str, Sequence[str]]
"""Names of images by part."""
Parts = Mapping[str, Sequence[RecordRows]]
"""The rows of each record, by part."""
OFFICIAL = "the set itself"
"""The split of the dataset's publishers, as reports call it."""


def build_records(
    rows: Sequence[Row],
    columns: Iterable[str],
    definition: Definition,
    source: Source,
    settings: Mapping[str, Any],
    lists: Lists | None = None,
) -> tuple[Parts, dict[str, Any]]:
    """The rows of the records of train, val and test, and the report; `columns` are all columns of the source.

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
        raise ImageError(
            f"no row has an image; {len(rows):,} were tried, the first: {_reason(rows[0])}\n"
            f"{_looked_for(definition.image_patterns, source)}"
        )
    if settings["variants"] and not any(row.variant for row in seen):
        raise ImageError(f"no augmented variant of an image was found; {_looked_for(definition.variants, source)}")
    split = choose_split(seen, definition, lists)
    cleaned, tallies = clean(rows, definition.rules)
    if not cleaned:
        raise SourceError(f"the rules of {definition.name} leave out all {len(rows):,} rows; check them")
    usable = [row for row in cleaned if row.key]
    parts: dict[str, list[RecordRows]] = {}
    duplicates = Counter(dict.fromkeys(DUPLICATES, 0))
    for part in PARTS:
        mine = [row for row in usable if split.part_of(row) == part]
        parts[part], counts = join_duplicates(mine, definition.duplicates)
        duplicates.update(counts)
    left_out = {tally.name: tally.num_dropped for tally in tallies} | {
        "no image": len(cleaned) - len(usable),
        "in no part of the split": sum(not split.part_of(row) for row in usable),
        "the same as another row": duplicates["num_identical"],
        "merged into another row's record": duplicates["num_merged"],
        "answered differently by another row": duplicates["num_dropped"],
    }
    of_records = [some[0] for part in PARTS for some in parts[part]]
    names_of: dict[str, set[str]] = {}
    for row in seen:
        if not row.variant:
            names_of.setdefault(row.key, set()).add(row.image_id)
    keys = {row.key for row in seen}
    has_own = split.by != OFFICIAL and any(row.split for row in seen)
    known = definition.questions
    return parts, {
        "name": definition.name,
        "title": definition.title,
        "licence": definition.licence,
        "homepage": definition.homepage,
        "source": {
            "place": source.location,
            "form": source.format,
            "revision": source.revision,
            "licence": source.licence,
            "num_files": len(source.files),
            "num_bytes": sum(source.sizes),
            "files_left_alone": list(source.ignored),
        },
        "columns_left_out": sorted({*columns} - definition.used_columns),
        "published": dict(definition.counts),
        "rows": {
            "read": sum(not row.variant for row in rows),
            "of_variants": sum(bool(row.variant) for row in rows),
            "records": len(of_records),
            "left_out": {reason: number for reason, number in left_out.items() if number},
        },
        "rules": [tally.to_json() for tally in tallies],
        "duplicates": {"policy": definition.duplicates, **duplicates},
        "images": {
            "written": len(keys),
            "names": len({name for names in names_of.values() for name in names if name}),
            "in_no_record": len(keys - {row.key for row in of_records}),
            "with_several_names": sum(len(names) > 1 for names in names_of.values()),
            "not_found": dict(Counter(_reason(row) for row in cleaned if not row.key).most_common(NUM_SHOWN)),
        },
        "split": _describe(split, seen, of_records),
        "official_split": _describe(Split(OFFICIAL, _official_part), seen, of_records) if has_own else None,
        "questions_not_in_the_definition": sum(nfc(row.question) not in known for row in of_records) if known else None,
        "settings": dict(settings),
    }


def _describe(split: Split, rows: Sequence[Row], of_records: Sequence[Row]) -> dict[str, Any]:
    """A split in the report: the images of all rows and the records by part, and what of val and test is in train."""
    parts = [split.part_of(row) for row in of_records]
    return {
        "by": split.by,
        "records": {part: parts.count(part) for part in PARTS},
        "images": {part: len({row.key for row in rows if split.part_of(row) == part}) for part in PARTS},
        "leaks": measure_leaks([row.key for row in of_records], parts, families(rows)),
    }


def _reason(row: Row) -> str:
    return f"{row.problem}: {row.image_id}" if row.image_id else f"{row.problem} ({row.origin})"


def _looked_for(patterns: Sequence[str], source: Source) -> str:
    roots = ", ".join(map(str, source.image_roots))
    return f"searched for {', '.join(patterns)} in {roots}; name the folder of the images with --image-root"


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


def write_parts(folder: Path, parts: Parts, definition: Definition) -> None:
    """Write a records file for each part that has records."""
    images = folder / IMAGES
    for part, rows_of_records in parts.items():
        if rows_of_records:
            records = (make_record(rows, images, definition) for rows in rows_of_records)
            write_records(
                folder / f"{part}.jsonl", (completed(one, lambda name: images / Path(name).name) for one in records)
            )


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
