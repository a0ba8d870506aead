"""The outcome of every row: `report.json`, and the table that is printed.

Design: rows that were read, plus those of augmented variants, equal the records plus the rows left out, each for one
reason; a test checks the sum. Nothing in the report depends on the time or the machine, so an interrupted preparation
ends with the same bytes as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.duplicates import Duplicates
from lookonce.datasets.prepare.rules import Tally
from lookonce.datasets.prepare.splits import PARTS, Leak
from lookonce.text import count, in_yaml, rows, shell, table

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
    sections = [
        _head(value),
        _rules(value["rules"]),
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


def _rules(tallies: list[Mapping[str, Any]]) -> str:
    lines = [(tally["name"], f"{tally['changed']:,}", f"{tally['dropped']:,}") for tally in tallies]
    return table(("rule", "changed", "left out"), lines)


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
