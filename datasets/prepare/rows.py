"""Rows, each one question about one image, before they become records: rules that clean them, duplicates, and splits.

The texts of a row may be empty or "nan", because rules must see that. A row is immutable and keeps its original texts,
so every change by a rule can be traced.

Rules are applied in the order of the definition, and counted. A rule is a pure function of one row. Labels are
separated by semicolons: "pink; red" has two. Equal labels are never merged, because "<5mm; <5mm" are two polyps.

Duplicates: rows are identical if the image's bytes, the question and the answer are, after the rules; one of them is
kept. If the answers differ (Kvasir-VQA has a row for each polyp), `merge` makes one record with all answers as
references, `keep` one record per answer, and `drop` none.

Splits: image families are split, never questions. A family is all images that could reveal each other: files with the
same bytes, files with the same name in the dataset, and images with the same value of a column that is to stay together
(the frames of one video). Families are sorted by their smallest image name, or by key if the dataset has no names,
shuffled by a seeded generator, and assigned: the first to val, the next to test, the rest to train. So a split depends
on the seed and on the images alone, not on the order of the rows or on the file format of the source, although re-saved
files have other bytes. It is the same on every machine and with every version of Python: a text as seed goes through
sha512. Shares are exact: 6,500 images are 4,550, 975 and 975. A leak is an image of val or test whose family is also in
train; it is measured for every split.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field

from lookonce.datasets.curriculum import connected
from lookonce.datasets.formats.image_references import without_suffix
from lookonce.settings import Section
from lookonce.text import nfc


@dataclass(frozen=True)
class Row:
    """One row of a source, after its image was found."""

    question: str
    answer: str
    key: str
    """The image key; empty if the row has no image, see `problem`."""
    image: str = ""
    """The image's file name below `images/`."""
    image_id: str = ""
    """The dataset's name for the image; empty if it has none."""
    split: str = ""
    """The official split of the row: train, val, test, or empty."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    problem: str = ""
    """Why the row has no image."""
    read_as: tuple[str, str] | None = None
    """Question and answer before any rule; None if no rule has changed them."""

    @property
    def as_read(self) -> tuple[str, str]:
        return self.read_as or (self.question, self.answer)


def text_of(value: Any) -> str:
    """A value of a column as text: missing values are empty, whole numbers have no `.0`."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isnan(value) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else str(value)


Text = Annotated[str, AfterValidator(nfc)]
"""A text of a YAML file that is compared with those of rows."""

NUM_EXAMPLES = 3
SEPARATOR = ";"


class _Rule(Section):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: Annotated[str, Field(min_length=1)]
    """The rule's name in reports."""


class DropRows(_Rule):
    """Leave out rows whose question or answer is one of these; case and outer spaces are ignored."""

    rule: Literal["drop_rows"]
    question: list[Text] = []
    answer: list[Text] = []

    def apply(self, row: Row) -> Row | None:
        return None if _is_one_of(row.question, self.question) or _is_one_of(row.answer, self.answer) else row


class KeepRows(_Rule):
    """Leave out rows whose metadata does not have one of these values."""

    rule: Literal["keep_rows"]
    metadata: str
    values: Annotated[list[Text], Field(min_length=1)]

    def apply(self, row: Row) -> Row | None:
        return row if any(_has(row, self.metadata, value) for value in self.values) else None


class _TextRule(_Rule):
    """Changes the text of questions or of answers; a text that it does not change keeps its form of Unicode."""

    field: Annotated[Literal["question", "answer"], Field(alias="in")] = "answer"

    def change(self, text: str) -> str:
        raise NotImplementedError

    def apply(self, row: Row) -> Row | None:
        before = nfc(row.question if self.field == "question" else row.answer)
        after = self.change(before)
        return row if after == before else replace(row, **{self.field: after}, read_as=row.as_read)  # type: ignore[arg-type]


class ReplaceWords(_TextRule):
    """Replace whole words: `{wrong: right}`; "lower-right" has two words."""

    rule: Literal["replace_words"]
    words: Annotated[dict[Text, str], Field(min_length=1)]

    def change(self, text: str) -> str:
        if not any(wrong in text for wrong in self.words):
            return text
        any_word = "|".join(map(re.escape, sorted(self.words, key=len, reverse=True)))
        return re.sub(rf"(?<!\w)(?:{any_word})(?!\w)", lambda match: self.words[match.group()], text)


class ReplaceLabels(_TextRule):
    """Replace whole labels, or whole answers: `{wrong: right}`; the spaces around them are kept."""

    rule: Literal["replace_labels"]
    labels: Annotated[dict[Text, str], Field(min_length=1)]

    def change(self, text: str) -> str:
        parts = text.split(SEPARATOR)
        return SEPARATOR.join(part.replace(part.strip(), self.labels.get(part.strip(), part.strip())) for part in parts)


class SeparateLabels(_TextRule):
    """Separate labels by a semicolon and a space: `a;b` becomes `a; b`."""

    rule: Literal["separate_labels"]

    def change(self, text: str) -> str:
        return f"{SEPARATOR} ".join(part.strip() for part in text.split(SEPARATOR)) if SEPARATOR in text else text


class OrderLabels(_TextRule):
    """Put labels into one order: the given one, the others after them alphabetically; none is removed."""

    rule: Literal["order_labels"]
    order: list[Text] = []

    def change(self, text: str) -> str:
        if SEPARATOR not in text:
            return text
        rank = {label: number for number, label in enumerate(self.order)}
        labels = [part.strip() for part in text.split(SEPARATOR)]
        return f"{SEPARATOR} ".join(sorted(labels, key=lambda label: (rank.get(label, len(rank)), label)))


class StripSpaces(_TextRule):
    """Remove spaces around the text, and make those inside single."""

    rule: Literal["strip_spaces"]

    def change(self, text: str) -> str:
        return " ".join(text.split())


Rule = Annotated[
    DropRows | KeepRows | ReplaceWords | ReplaceLabels | SeparateLabels | OrderLabels | StripSpaces,
    Field(discriminator="rule"),
]


def _is_one_of(text: str, values: Iterable[str]) -> bool:
    return bool(values) and nfc(text).strip().casefold() in {value.casefold() for value in values}


@dataclass
class Tally:
    """How many rows a rule has changed and left out, with examples."""

    name: str
    rule: str
    changed: int = 0
    dropped: int = 0
    examples: list[list[str]] = field(default_factory=list)
    """The first few different changes, each as text before and after, or question and answer of a row left out."""

    def note(self, before: Row, after: Row | None) -> None:
        if after is None:
            self.dropped += 1
            example = [before.question, before.answer]
        elif after is not before:
            self.changed += 1
            is_question = after.question != before.question
            example = [before.question, after.question] if is_question else [before.answer, after.answer]
        else:
            return
        if len(self.examples) < NUM_EXAMPLES and example not in self.examples:
            self.examples.append(example)


def clean(rows: Iterable[Row], rules: Sequence[Rule]) -> tuple[list[Row], list[Tally]]:
    """The remaining rows in order, and the tally of each rule.

    A last rule leaves out rows whose question or answer is then empty, since a record cannot be empty.
    """
    steps = [(rule.apply, Tally(rule.name, rule.rule)) for rule in rules]
    steps.append((_not_empty, Tally("empty question or answer", "always")))
    kept = []
    for row in rows:
        for apply, tally in steps:
            after = apply(row)
            tally.note(row, after)
            if after is None:
                break
            row = after
        else:
            kept.append(row)
    return kept, [tally for _, tally in steps]


def _not_empty(row: Row) -> Row | None:
    return row if row.question.strip() and row.answer.strip() else None


Policy = Literal["merge", "keep", "drop"]
RecordRows = tuple[Row, ...]
"""The rows that one record is made of, in order; the answers of the later ones are further references."""


DUPLICATES = {
    "num_pairs": "pairs of image and question with several rows",
    "num_differing_pairs": "those pairs whose answers differ",
    "num_identical": "rows left out because another row is identical",
    "num_merged": "rows that became a further reference of another row's record",
    "num_dropped": "rows left out because their answers differ",
}


def join_duplicates(rows: Iterable[Row], policy: Policy) -> tuple[list[RecordRows], dict[str, int]]:
    """The rows of each record, in the order of their first rows, and the counts of `DUPLICATES`."""
    by_pair: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_pair.setdefault((row.key, nfc(row.question)), []).append(row)
    records: list[RecordRows] = []
    counts = dict.fromkeys(DUPLICATES, 0)
    for alike in by_pair.values():
        first_of: dict[str, Row] = {}
        for row in alike:
            first_of.setdefault(nfc(row.answer), row)
        different = [*first_of.values()]
        counts["num_pairs"] += len(alike) > 1
        counts["num_differing_pairs"] += len(different) > 1
        counts["num_identical"] += len(alike) - len(different)
        if len(different) == 1 or policy == "keep":
            records += [(row,) for row in different]
        elif policy == "merge":
            records.append(tuple(different))
            counts["num_merged"] += len(different) - 1
        else:
            counts["num_dropped"] += len(different)
    return records, counts


PARTS = ("train", "val", "test")
SYNONYMS = dict.fromkeys(("validation", "validate", "valid", "dev"), "val") | {"training": "train", "testing": "test"}


def part_of(name: str) -> str:
    """Our name for a dataset's name of a part; empty if there is none (Kvasir-VQA's only part is called `raw`)."""
    name = name.strip().lower()
    return name if name in PARTS else SYNONYMS.get(name, "")


def sample(rows: Iterable[Row], part: str, where: Mapping[str, str], seed: int, num_rows: int) -> list[Row]:
    """The first rows of a part of the official split, shuffled as the library `datasets` does; fewer if it has fewer.

    `where` is metadata that they have. Each has its number among them as `val_id`.
    """
    usable = [row for row in rows if row.split == part and all(_has(row, *pair) for pair in where.items())]
    order = np.random.default_rng(seed).permutation(len(usable))[:num_rows]
    return [
        replace(usable[place], metadata={**usable[place].metadata, "val_id": number})
        for number, place in enumerate(order.tolist())
    ]


def _has(row: Row, name: str, value: str) -> bool:
    return nfc(text_of(row.metadata.get(name))) == value


def families(rows: Iterable[Row], together: Sequence[str] = ()) -> dict[str, str]:
    """The family of each image key, named by its smallest image name, or by its smallest key if it has no names."""
    links: dict[tuple[str, ...], None] = {}  # many rows have the same links; names sort before keys
    for row in rows:
        named = (f"0{nfc(row.image_id)}",) if row.image_id else ()
        shared = (f"2{column} {nfc(text_of(row.metadata[column]))}" for column in together if column in row.metadata)
        links[f"1{row.key}", *named, *shared] = None
    smallest_of = connected(links)
    return {node[1:]: smallest[1:] for node, smallest in smallest_of.items() if node.startswith("1")}


def split_by_image(
    rows: Sequence[Row], shares: Mapping[str, float], seed: int, together: Sequence[str] = ()
) -> dict[str, str]:
    """The part of each image key; `shares` are shares of the images."""
    family_of = families(rows, together)
    size_of = Counter(family_of.values())
    order = sorted(size_of)
    random.Random(f"split, seed {seed}").shuffle(order)
    part_of_family: dict[str, str] = {}
    for part in ("val", "test"):
        room = round(len(family_of) * shares[part])
        for name in order:
            if name not in part_of_family and size_of[name] <= room:
                part_of_family[name] = part
                room -= size_of[name]
    return {key: part_of_family.get(name, "train") for key, name in family_of.items()}


def split_by_lists(names: Iterable[str], lists: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """The part of each image by its name, with or without its suffix; empty for those that are in no list."""
    part_of_name = {without_suffix(nfc(name)): part for part, listed in lists.items() for name in listed}
    return {name: part_of_name.get(without_suffix(nfc(name)), "") for name in names}


def measure_leaks(keys: Iterable[str], parts: Iterable[str], family_of: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """How much of val and of test is also in train, given the image key and the part of each question.

    An image is also in train if its family is; `questions` are those about the images of the part.
    """
    questions_about: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    for key, part in zip(keys, parts, strict=True):
        if part:
            questions_about[part][family_of[key]] += 1
    leaks = {}
    for part in ("val", "test"):
        if questions_about[part] and questions_about["train"]:
            known = questions_about[part].keys() & questions_about["train"].keys()
            leaks[part] = {
                "images": len(questions_about[part]),
                "also_in_train": len(known),
                "share": round(len(known) / len(questions_about[part]), 4),
                "questions": questions_about[part].total(),
                "about_images_in_train": sum(questions_about[part][name] for name in known),
            }
    return leaks
