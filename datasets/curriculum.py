"""Which records are trained on, and in which order: by their metadata, and by a map from questions to stages.

Values of metadata are compared as the texts that JSON would write, without a needless `.0`: a CSV file has texts alone,
and a parquet column with gaps has 1.0 for 1.

A stage map is a YAML file with the stage and category of each question text, for any records:

    questions:
      "Is there text?": {stage: 1, category: yes/no}
      "Where is the finding?": {stage: 2}
    default: {stage: 3}

The map replaces what records say themselves, because labels given row by row differ between rows with one question.
A question that the map lacks is an error unless there is a default: its records would silently miss from a selection.

A record is selected if each field has one of the given values. Of these records, the share is the first part of one
random order that follows from the seed and the number of all training records. So shares are nested: those of 0.384 are
among those of 0.694. The share is one of records and not of images, so a random set differs from a stage in the choice
of records alone. `data.replay` selects by the same rules and order from what is left out.

A fold is one of several parts of the images, of equal size to one image. Training leaves out the records about it.
Images are known by their keys: two paths with the same bytes are in one fold, and so are images that one record shows
together. The folds follow from the seed and the images alone. Records without images are in no fold.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AliasChoices, BeforeValidator, ConfigDict, Field, model_validator

from lookonce.datasets.formats.record import Record, as_list
from lookonce.errors import RecordsError
from lookonce.settings import MAX_COUNT, TRUTH_VALUES, Section, read_settings
from lookonce.text import Notify, count, listed, nfc, quiet, quoted, shown, value_of

MAX_NUMBER = 2**53
"""Larger integers are not exact as the floating-point numbers that other programs read."""
Keys = tuple[str, ...]
Item = TypeVar("Item", bound=Any)
KeysOf = Callable[[Record], Keys]
"""The keys of a record's images."""


def _is_scalar(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be a text, a number, true or false")
    if not isinstance(value, str) and not abs(value) <= MAX_NUMBER:  # also not a number
        raise ValueError(f"must be a number from -{MAX_NUMBER:,} to {MAX_NUMBER:,}, or a text in quotes")
    return value


Value = Annotated[Any, AfterValidator(_is_scalar)]
Values = Annotated[list[Value], BeforeValidator(as_list), Field(min_length=1)]
"""One value or a list of them."""


def _are_different(values: list[Any]) -> list[Any]:
    most, number = next(iter(Counter(map(as_text, values)).most_common(1)), ("", 0))
    if number > 1:
        raise ValueError(f"has {shown(most)} twice; write each value once")
    return values


DifferentValues = Annotated[list[Value], AfterValidator(_are_different)]


def as_text(value: Any) -> str:
    """A value of metadata or of the run file as text, in the form in which texts are compared."""
    if isinstance(value, str):
        return nfc(value)
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return nfc(json.dumps(value, ensure_ascii=False, default=str))


def texts_of(record: Record, field: str) -> list[str]:
    """The values of a metadata field as texts: several if it is a list, none if the record lacks it."""
    value = value_of(record.metadata, field)
    return [] if value is None else [as_text(item) for item in as_list(value)]


def value_index(record: Record, field: str, values: Sequence[Any]) -> int | None:
    """Which of some values a field of the record has, from 0; None if it has none of them, or several values."""
    texts = texts_of(record, field)
    known = [as_text(value) for value in values]
    return known.index(texts[0]) if len(texts) == 1 and texts[0] in known else None


def check_values(records: Iterable[Record], field: str, values: Iterable[Any], key: str) -> None:
    """Raise RecordsError if no record has one of the values of a metadata field, which the run file's `key` names."""
    records = list(records)
    present = {text for record in records for text in texts_of(record, field)}
    if not present:
        known = sorted({name for record in records for name in record.metadata})
        advice = "records have no metadata; `data.stage_map` gives them some"
        fields = f"fields are {listed(known, 10)}" if known else advice
        raise RecordsError(f"`{key}`: no record has the field {field}; {fields}")
    if unknown := [text for text in map(as_text, values) if text not in present]:
        quotes = f"; {TRUTH_VALUES}" if unknown[0] in ("true", "false") else ""
        raise RecordsError(
            f"`{key}`: no record has {field} {unknown[0]}; values are {listed(sorted(present), 10)}{quotes}"
        )


def connected(groups: Iterable[Sequence[Item]]) -> dict[Item, Item]:
    """For each item the smallest that it is connected with: they are in one group, or through other items."""
    parent: dict[Item, Item] = {}

    def find(item: Item) -> Item:
        while parent.setdefault(item, item) != item:
            parent[item] = item = parent[parent[item]]
        return item

    for group in groups:
        for item in group:
            smaller, larger = sorted((find(group[0]), find(item)))
            parent[larger] = smaller
    return {item: find(item) for item in parent}


def named(record: Record, field: str) -> str:
    """The record's value of a field for a message: "stage 2", "no stage"."""
    texts = texts_of(record, field)
    return f"{field} {shown(', '.join(texts))}" if texts else f"no {field}"


def counted(names: Iterable[str]) -> str:
    """How often each name occurs: "stage 2 (1,200), stage 3 (80)"."""
    numbers = sorted(Counter(names).items())
    return listed([f"{name} ({number:,})" for name, number in numbers], 10)


Stage = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]


class QuestionStage(Section):
    """The metadata of records with a question."""

    stage: Stage | None = None
    """The stage of a curriculum."""
    category: str | None = None
    """The kind of question."""

    @model_validator(mode="after")
    def _has_stage_or_category(self) -> QuestionStage:
        if self.stage is None and self.category is None:
            raise ValueError("needs a stage or a category")
        return self


class StageMap(Section):
    """The stage and category of each question."""

    questions: dict[Annotated[str, AfterValidator(nfc)], QuestionStage]
    """By question text, which must be the same to the letter; Unicode's normal form does not count."""
    default: QuestionStage | None = None
    """For questions that the map lacks."""


def read_stage_map(path: Path) -> StageMap:
    """The stage map in a file; raises UsageError if it is missing or not YAML, or a key or value is wrong."""
    allowed = 'a mapping with `questions`, such as {questions: {"Is there text?": {stage: 1}}}'
    return read_settings(path, StageMap, f"the stage map {path}", "correct `data.stage_map`", allowed)


def with_stages(records: dict[str, list[Record]], path: Path, notify: Notify = quiet) -> dict[str, list[Record]]:
    """The records of all splits with the stages and categories of a map in their metadata.

    `notify` gets the number of questions that have the default.

    Raises:
        UsageError: the map is missing or wrong.
        RecordsError: the map lacks questions; counts and names them. Or the questions of one record differ in stage.
    """
    stage_map = read_stage_map(path)
    unknown = Counter(
        question
        for split_records in records.values()
        for record in split_records
        for turn in record.turns
        if (question := nfc(turn.question)) not in stage_map.questions
    )
    if unknown and stage_map.default is None:
        raise RecordsError(
            f"the stage map {path} lacks {_questions(unknown)}; add them, or give all others a stage with `default`"
        )
    if unknown:
        notify(f"the stage map {path} gives its default to {_questions(unknown)}")
    return {split: [_staged(record, stage_map) for record in split_records] for split, split_records in records.items()}


def _questions(unknown: Counter[str]) -> str:
    examples = [f"{quoted(question)} ({number:,})" for question, number in unknown.most_common()]
    texts, times = count(len(unknown), "question text"), count(unknown.total(), "time")
    return f"{texts}, asked {times}: {listed(examples, 5)}"


def _staged(record: Record, stage_map: StageMap) -> Record:
    entries = [stage_map.questions.get(turn.in_nfc.question, stage_map.default) for turn in record.turns]
    if any(entry != entries[0] for entry in entries):
        raise RecordsError(
            f"{record.origin}: the questions of one record must have the same stage and category, got "
            f"{listed([quoted(turn.question) for turn in record.turns])}; write a record for each of them"
        )
    entry: dict[str, Any] = entries[0].model_dump(exclude_none=True) if entries[0] else {}
    return replace(record, metadata={**record.metadata, **entry})


class Selection(Section):
    """Values of metadata fields, and a share of the records that have them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Values]
    share: Annotated[float, Field(gt=0, le=1)] = 1
    """How many of the records that have the values are selected. All other keys are metadata fields."""

    @property
    def fields(self) -> dict[str, Values]:
        return self.__pydantic_extra__


def _misfit(record: Record, fields: Mapping[str, frozenset[str]]) -> str:
    """The first field without one of its values, such as "stage 2"; empty if there is none."""
    misfits = (field for field, values in fields.items() if values.isdisjoint(texts_of(record, field)))
    return next((named(record, field) for field in misfits), "")


def _select(
    records: Sequence[Record], order: Sequence[int], selection: Selection, key: str
) -> tuple[list[int], dict[int, str]]:
    """The numbers of the records that are selected, and why each of the others is not; `order` is the random one."""
    for field, values in selection.fields.items():
        check_values((records[number] for number in order), field, values, key)
    fields = {field: frozenset(map(as_text, values)) for field, values in selection.fields.items()}
    reason_of = {number: _misfit(records[number], fields) for number in order}
    fitting = [number for number in order if not reason_of[number]]
    if not fitting:
        raise RecordsError(f"`{key}` leaves no record: each field must have one of its values; write fewer fields")
    num_selected = max(round(selection.share * len(fitting)), 1)
    reason_of |= dict.fromkeys(fitting[num_selected:], f"not in the share of {selection.share:g}")
    return sorted(fitting[:num_selected]), {number: reason for number, reason in reason_of.items() if reason}


def select_training(
    records: Sequence[Record], where: Selection, replay: Selection | None, seed: int, notify: Notify = quiet
) -> list[Record]:
    """The records that `where` selects, and those that `replay` selects of the others, in their order.

    `notify` gets the number of those that are left out, and of those that are replayed, by the value that decided.

    Raises:
        RecordsError: no record has a field or value, or none is left.
    """
    order = list(range(len(records)))
    # A string seed is hashed with sha512, so the order is the same in every process.
    random.Random(f"seed {seed}, share of records").shuffle(order)
    selected, left_out = _select(records, order, where, "data.where")
    total = count(len(records), "train record")
    if left_out:
        notify(f"`data.where` leaves out {len(left_out):,} of {total}: {counted(left_out.values())}")
    if replay:
        if not left_out:
            raise RecordsError("`data.where` leaves no record out, so `data.replay` has none to select; remove it")
        replayed, _ = _select(records, [number for number in order if number in left_out], replay, "data.replay")
        notify(f"`data.replay` trains on {len(replayed):,} of them: {counted(left_out[index] for index in replayed)}")
        selected = sorted(selected + replayed)
    return [records[index] for index in selected]


class Fold(Section):
    """One of several parts of the training images."""

    fold: Annotated[int, Field(ge=1, le=1_000_000)]
    """The number of the part that is left out, from 1."""
    of: Annotated[int, Field(ge=2, le=1_000_000)]
    """The number of parts."""

    @model_validator(mode="after")
    def _fold_exists(self) -> Fold:
        if self.fold > self.of:
            raise ValueError(f"the folds of {self.of} are 1 to {self.of} (got fold {self.fold})")
        return self


def hold_out(records: Sequence[Record], fold: Fold, seed: int, keys_of: KeysOf) -> tuple[list[Record], list[Record]]:
    """The records to train on, and those about the fold; raises RecordsError if there are fewer images than folds."""
    keys = [keys_of(record) for record in records]
    group_of = connected(keys)
    order = sorted(set(group_of.values()))
    if len(order) < fold.of:
        raise RecordsError(
            f"`data.held_out`: {count(len(order), 'image')} cannot be divided into {fold.of} folds; images that a "
            "record shows together are in one fold"
        )
    # A string seed is hashed with sha512, so the order is the same in every process.
    random.Random(f"seed {seed}, folds of images").shuffle(order)
    left_out = {group for place, group in enumerate(order) if place % fold.of == fold.fold - 1}
    parts: tuple[list[Record], list[Record]] = ([], [])
    for record, record_keys in zip(records, keys, strict=True):
        parts[bool(record_keys) and group_of[record_keys[0]] in left_out].append(record)
    return parts


class StageOrder(Section):
    """The stages of an epoch in their order."""

    by: Annotated[str, Field(min_length=1)]
    """The metadata field that says in which stage a record is."""
    stages: Annotated[DifferentValues, Field(min_length=1, validation_alias=AliasChoices("stages", "lessons"))]
    """The field's values, in the order of the stages; run files of 0.3 call them `lessons`."""

    def find(self, record: Record) -> int | None:
        """The number of a record's stage, from 0; None if it is in no stage, or in several."""
        return value_index(record, self.by, self.stages)

    def stage_of(self, record: Record) -> int:
        """The number of a record's stage, from 0; it must have one."""
        number = self.find(record)
        assert number is not None, f"{record.origin}: {named(record, self.by)}"
        return number

    def check(self, records: Sequence[Record]) -> str:
        """How many records each stage has, as text; raises RecordsError if records are in no stage, or in several."""
        sizes = Counter(map(self.find, records))
        if sizes[None]:
            values = counted(named(record, self.by) for record in records if self.find(record) is None)
            raise RecordsError(
                f"`batch.order`: {sizes[None]:,} of {count(len(records), 'train record')} are not in one stage: "
                f"{values}; add the values to `stages`, or leave the records out with `data.where`"
            )
        return ", then ".join(f"{self.by} {as_text(value)} ({sizes[n]:,})" for n, value in enumerate(self.stages))
