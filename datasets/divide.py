"""Divide the records of one file into train, val and test, so that no image is in two of them.

Design: image families are divided, as in `lookonce data prepare`, by the same code (prepare/rows.py): files with the
same bytes are one image whatever their names, images that one record shows stay together, and so do records with the
same value of a metadata key, such as a patient. Image files are read once, for their keys; one that cannot be read
counts by its path. Shares are of the images; a record without images counts as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.prepare.rows import PARTS, Row, split_by_image
from lookonce.datasets.records import Record
from lookonce.errors import UsageError
from lookonce.text import Notify, count, listed, nfc, quiet, value_of

HELD = tuple(part for part in PARTS if part != "train")
"""The parts that have a share; train has the rest."""
RECORD = "record"
"""The key under which the rows of a record have its number, so that its images stay together."""


@dataclass(frozen=True)
class Division:
    """How records are divided."""

    shares: Mapping[str, float]
    """The shares of the images in val and test."""
    seed: int
    together: tuple[str, ...] = ()
    """Metadata keys: records with the same value stay in one part."""


@dataclass(frozen=True)
class Part:
    """The records of one part, and the file that they are written to."""

    name: str
    path: Path
    num_records: int
    num_images: int


def parse_shares(text: str) -> dict[str, float]:
    """The shares in a text such as "val=0.1,test=0.1".

    Raises:
        UsageError: it is not of this form, or nothing is left for train.
    """
    shares: dict[str, float] = {}
    with contextlib.suppress(ValueError):
        pairs = [one.partition("=") for one in text.split(",")]
        shares = {name.strip(): float(value) for name, _, value in pairs}
        if len(shares) < len(pairs) or not {*shares} <= {*HELD} or not all(0 < share < 1 for share in shares.values()):
            shares = {}
    if not shares or sum(shares.values()) >= 1:
        raise UsageError(
            "--split must name shares of val, of test or of both, and leave some for train, such as val=0.1,test=0.1 "
            f"(got {text!r})"
        )
    return shares


def part_paths(target: Path, shares: Mapping[str, float]) -> dict[str, Path]:
    """The file of each part: "own.train.jsonl" beside "own.jsonl"."""
    names = ("train", *(part for part in HELD if part in shares))
    return {part: target.with_name(f"{target.stem}.{part}{target.suffix}") for part in names}


def divide(records: Sequence[Record], division: Division, notify: Notify = quiet) -> dict[str, list[Record]]:
    """The records of each part, in their order. `notify` gets the number of images that cannot be read.

    Raises:
        UsageError: no record has a key of `together`, or a part gets no image.
    """
    _check_keys(records, division.together)
    index = index_images(records, needs_one=False)
    if index.unusable:
        number, reason = count(len(index.unusable), "image"), next(iter(index.unusable.values()))
        notify(f"{number} cannot be read, so copies under other names are not recognised; the first: {reason}")
    keys = [_keys(record, index) for record in records]
    rows = [
        Row("", "", key, metadata={**_values(record, division.together), RECORD: number})
        for number, (record, some) in enumerate(zip(records, keys, strict=True))
        for key in some
    ]
    shares = dict.fromkeys(HELD, 0.0) | dict(division.shares)
    part_of = split_by_image(rows, shares, division.seed, (RECORD, *division.together))
    parts: dict[str, list[Record]] = {part: [] for part in ("train", *division.shares)}
    for record, some in zip(records, keys, strict=True):
        parts[part_of[some[0]]].append(record)
    if empty := [part for part, some in parts.items() if not some]:
        raise UsageError(
            f"--split leaves no image for {listed(empty)}: {count(len(part_of), 'image')} in families that stay "
            "together; choose other shares"
        )
    return parts


def num_images(records: Iterable[Record]) -> int:
    """The number of image files that some records name."""
    return len({image for record in records for image in record.images})


def _keys(record: Record, index: ImageIndex) -> tuple[str, ...]:
    """The keys of a record's images; of one without images a key of its texts."""
    return index.keys_of(record) or (f"text {xxhash.xxh3_128_hexdigest(repr(record.turns).encode())}",)


def _values(record: Record, keys: Iterable[str]) -> dict[str, object]:
    return {key: value for key in keys if (value := value_of(record.metadata, key)) not in (None, "")}


def _check_keys(records: Iterable[Record], keys: Iterable[str]) -> None:
    known = {nfc(name) for record in records for name in record.metadata}
    if unknown := [key for key in keys if nfc(key) not in known]:
        has = f"keys are {listed(sorted(known), 10)}" if known else "records have no metadata"
        raise UsageError(f"--together {unknown[0]}: no record has this key in its metadata; {has}")
