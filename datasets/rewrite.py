"""Write the records of a file again: in another format, divided into train, val and test, or only the usable ones.

Design: to convert leaves images where they are. The new file refers to them by a path relative to itself or to another
image root, and by an absolute path if they lie elsewhere. Only embedded images without a path (`data:` URLs, lists of
embedded images) are written to files, byte for byte, each once, under its image key. Records are read one by one and
kept in memory, some hundred bytes each; embedded bytes are not.

To divide puts no image in two parts. Image families are divided, as in `lookonce data prepare`, by the same code
(prepare/rows.py): files with the same bytes are one image whatever their names, images that one record shows stay
together, and so do records with the same value of a metadata key, such as a patient. Image files are read once, for
their keys; one that cannot be read counts by its path. Shares are of the images; a record without images counts as one.

To clean leaves out malformed records and those of broken images. Nothing is mended, and everything left out is in the
report. What is kept of JSONL keeps its bytes, so that the two files can be compared line by line. Other kinds of files
are written in the canonical format, or flat in CSV. Images are decoded whole by default, as a cache will do it, because
the header of a truncated file is fine.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from PIL import Image
from tqdm import tqdm

from lookonce.datasets.formats.image_references import suffix_of_format
from lookonce.datasets.formats.registry import FormatName
from lookonce.datasets.images import UNDECODABLE, bytes_key, index_images, inspect_images
from lookonce.datasets.prepare.rows import PARTS, Row, split_by_image
from lookonce.datasets.records import (
    FILE_TYPES,
    Collector,
    LeftOut,
    MalformedKind,
    Record,
    RecordsFile,
    by_kind,
    check_target,
    format_of_file,
    leave_out,
    write_records,
)
from lookonce.datasets.text_files import folder_in_place, kind_of_file
from lookonce.errors import RecordsError, UsageError
from lookonce.files import atomic_write
from lookonce.text import Notify, count, first_few, listed, located, nfc, quiet, rows, value_of

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

    @property
    def content(self) -> str:
        return f"{count(self.num_records, 'record')}, {count(self.num_images, 'image')}"


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
    keys = [  # of a record without images a key of its texts
        index.keys_of(record) or (f"text {xxhash.xxh3_128_hexdigest(repr(record.turns).encode())}",)
        for record in records
    ]
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


def _values(record: Record, keys: Iterable[str]) -> dict[str, object]:
    return {key: value for key in keys if (value := value_of(record.metadata, key)) not in (None, "")}


def _check_keys(records: Iterable[Record], keys: Iterable[str]) -> None:
    known = {nfc(name) for record in records for name in record.metadata}
    if unknown := [key for key in keys if nfc(key) not in known]:
        has = f"keys are {listed(sorted(known), 10)}" if known else "records have no metadata"
        raise UsageError(f"--together {unknown[0]}: no record has this key in its metadata; {has}")


UNKNOWN_SUFFIX = ".bin"
"""The suffix of embedded bytes that are not a known image format; reading them as an image reports that."""
IMAGES = "images"
"""The folder beside the records to which embedded images are written."""


@dataclass(frozen=True)
class ConvertReport:
    """What `convert` read and wrote."""

    source: Path
    source_form: str
    target: Path
    target_form: str
    num_records: int
    num_turns: int
    num_images: int
    """Distinct paths."""
    num_several_images: int
    """Records with more than one image."""
    num_text_only: int
    """Records without an image."""
    images_folder: Path
    num_embedded: int
    """Distinct images that were embedded."""
    num_written: int
    """Embedded images that were not there before."""
    num_unknown: int
    """Embedded images whose format is unknown."""
    num_coerced: int = 0
    """Answers that were numbers or booleans, now text."""
    left_out_columns: tuple[str, ...] = ()
    """Columns of the source that hold bytes, such as masks."""
    parts: tuple[Part, ...] = ()
    """The files of a division, which are written in place of `target`."""

    def text(self) -> str:
        several, none = self.num_several_images, self.num_text_only
        shown = [(several, "with several"), (none, "without any")]
        kinds = ", ".join(f"{count(number, 'record')} {what}" for number, what in shown if number)
        lines = [
            ("read", f"{self.source}, {self.source_form}"),
            *(() if self.parts else (("wrote", f"{self.target}, {self.target_form}"),)),
            *((one.name, f"{one.path}, {self.target_form}: {one.content}") for one in self.parts),
            ("records", f"{self.num_records:,}, {count(self.num_turns, 'question')}"),
            ("images", f"{count(self.num_images, 'file')} named" + (f"; {kinds}" if kinds else "")),
        ]
        if self.num_coerced:
            lines.append(("numbers", f"{count(self.num_coerced, 'answer')} now text instead of a number or boolean"))
        if self.left_out_columns:
            lines.append(("left out", f"columns of bytes: {', '.join(self.left_out_columns)}"))
        if self.num_embedded:
            there = self.num_embedded - self.num_written
            unknown = f", {self.num_unknown:,} of no known format" if self.num_unknown else ""
            before = f", {there:,} there before" if there else ""
            lines.append(
                ("embedded", f"{count(self.num_written, 'file')} written to {self.images_folder}{before}{unknown}")
            )
        return rows(lines)


@dataclass
class Extractor:
    """Writes embedded images to a folder, each under its image key."""

    folder: Path
    written: dict[str, Path] = field(default_factory=dict)
    """The path of each image by its key, also of those that were there before."""
    num_new: int = 0

    def keep(self, data: bytes) -> Path:
        """Write an image, unless it is there, and return its path.

        Files are not flushed, which would take most of the time: after a kill they are complete, and one that a power
        cut has damaged is recognised by its content and written again.
        """
        key = bytes_key(data)
        if key not in self.written:
            path = Path(os.path.abspath(self.folder), key + _suffix(data))
            if not (path.exists() and path.read_bytes() == data):
                self._write(path, data)
            self.written[key] = path
        return self.written[key]

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, len(data), flushes=False) as temporary:
            temporary.write_bytes(data)
        self.num_new += 1


def _suffix(data: bytes) -> str:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return suffix_of_format(image.format or "")
    except (*UNDECODABLE, MemoryError):
        return UNKNOWN_SUFFIX


def convert(
    source: Path,
    target: Path,
    *,
    source_format: FormatName | None = None,
    target_format: FormatName | None = None,
    image_root: Path | None = None,
    target_root: Path | None = None,
    coerce_answers: bool = False,
    overwrite: bool = False,
    division: Division | None = None,
    notify: Notify = quiet,
) -> ConvertReport:
    """Write the records of `source` to `target` in another format, or in another type of file.

    The image paths of `source` are relative to `image_root`, those of `target` to `target_root`. Without it they are
    relative to its own folder, and images elsewhere get absolute paths. `coerce_answers` writes answers that are
    numbers or booleans as text. With a `division`, the files of its parts are written in place of `target`, and
    `notify` gets the number of images that cannot be read.

    Raises:
        UsageError: there is no `source`, or it cannot be divided so; or a file to write exists, has an unknown suffix,
            or is an archive with images of the records.
        RecordsError: a record cannot be read, or the format cannot hold it; names the record.
    """
    paths = part_paths(target, division.shares) if division else {"": target}
    for path in paths.values():
        check_paths(source, path, overwrite)
    written_format = format_of_file(target, target_format)
    extractor = Extractor((target_root or target.parent) / IMAGES)
    keep = extractor.keep
    file = RecordsFile(source, image_root, format=source_format, keep=keep, coerce_answers=coerce_answers)
    records = list(tqdm(file, desc="read records", unit="record", leave=False, disable=None))
    images = _images(records)
    parts = divide(records, division, notify) if division else {"": records}
    for path in paths.values():
        check_not_among(path, images)
    for part, path in paths.items():
        write_records(path, parts[part], target_root, format=target_format, absolute=target_root is None)
    return ConvertReport(
        source,
        file.format or "",
        target,
        written_format,
        len(records),
        sum(len(record.turns) for record in records),
        len(images),
        sum(len(record.images) > 1 for record in records),
        sum(not record.images for record in records),
        extractor.folder,
        len(extractor.written),
        extractor.num_new,
        sum(path.suffix == UNKNOWN_SUFFIX for path in extractor.written.values()),
        file.num_coerced,
        file.left_out_columns,
        tuple(Part(part, paths[part], len(some), len(_images(some))) for part, some in parts.items() if part),
    )


def _images(records: Iterable[Record]) -> set[Path]:
    return {image for record in records for image in record.images}


def check_paths(source: Path, target: Path, overwrite: bool) -> None:
    """Check the two files of a command that reads records and writes others.

    Raises:
        UsageError: there is no `source`; or `target` is the same file, exists, or has an unknown suffix.
    """
    if not source.exists() or source.is_dir():
        what = f": {folder_in_place(source)}" if source.is_dir() else "; name a JSONL, JSON, CSV or parquet file"
        raise UsageError(f"no records file at {located(source)}{what}")
    check_target(target, source, (".jsonl", *FILE_TYPES), overwrite=overwrite)


def check_not_among(target: Path, images: set[Path]) -> None:
    """Check that a file to be written is not an image of the records, or an archive of them.

    Raises:
        UsageError: it is.
    """
    path = Path(os.path.abspath(target))
    if path.exists() and any(image == path or path in image.parents for image in images):
        raise UsageError(f"{target} holds images of these records; name another file to write")


NUM_KINDS = 10
"""The text shows this many kinds of malformed records."""


@dataclass(frozen=True)
class CleanReport:
    """What `clean` kept, and what it left out for which reason."""

    source: Path
    target: Path
    num_kept: int
    is_unchanged: bool
    """Whether the lines that were kept have the bytes that they had."""
    malformed: tuple[MalformedKind, ...]
    left_out: LeftOut
    """The records of images that are missing or cannot be decoded."""
    num_coerced: int
    """Answers that are numbers or booleans, read as text."""
    left_out_columns: tuple[str, ...] = ()
    """Columns of the source that hold bytes, such as masks."""

    @property
    def num_malformed(self) -> int:
        return sum(len(kind.places) for kind in self.malformed)

    @property
    def num_records(self) -> int:
        """All records of the source."""
        return self.left_out.num_records + self.num_malformed

    def text(self) -> str:
        lines = [
            ("read", f"{self.source}: {count(self.num_records, 'record')}"),
            ("wrote", f"{self.target}: {count(self.num_kept, 'record')}{', unchanged' if self.is_unchanged else ''}"),
            ("left out", f"{count(self.num_malformed, 'malformed record')}, {self._of_images()}"),
        ]
        kinds = first_few([kind.text() for kind in self.malformed], NUM_KINDS, "other mistake")
        if self.num_coerced and not self.is_unchanged:
            lines.append(("numbers", f"{count(self.num_coerced, 'answer')} now text instead of a number or boolean"))
        if self.left_out_columns:
            lines.append(("columns", f"left out, as they hold bytes: {', '.join(self.left_out_columns)}"))
        return "\n".join([rows(lines), *kinds, *self.left_out.lines()])

    def _of_images(self) -> str:
        records, images = self.left_out.num_left_out, len(self.left_out.images)
        return f"{count(records, 'record')} of {count(images, 'unusable image')}" if images else "no image unusable"

    def to_json(self) -> dict[str, Any]:
        """The keys are explained in the help of `lookonce data clean`."""
        return {
            "source": str(self.source),
            "target": str(self.target),
            "num_records": self.num_records,
            "num_kept": self.num_kept,
            "num_malformed": self.num_malformed,
            "num_with_unusable_images": self.left_out.num_left_out,
            "num_coerced": self.num_coerced,
            "left_out_columns": list(self.left_out_columns),
            "malformed": [asdict(kind) for kind in self.malformed],
            "images": [asdict(image) for image in self.left_out.images],
        }


def clean(
    source: Path,
    target: Path,
    image_root: Path | None = None,
    *,
    decode: bool = True,
    coerce_answers: bool = False,
    overwrite: bool = False,
) -> CleanReport:
    """Write the records of `source` that can be trained on to `target`.

    `decode` decodes whole images, not only their headers. `coerce_answers` keeps answers that are numbers or booleans,
    as text.

    Raises:
        UsageError: there is no `source`; or `target` exists, has an unknown suffix, is an archive with images of the
            records, or lies in another folder than the images are relative to.
        RecordsError: `source` cannot be read as text, or no record of it can be used.
    """
    check_paths(source, target, overwrite)
    malformed = Collector()
    file = RecordsFile(source, image_root, coerce_answers=coerce_answers, broken=malformed)
    records = list(tqdm(file, desc="read records", unit="record", leave=False, disable=None))
    images = inspect_images(_images(records), decode=decode)
    kept, left_out = leave_out(records, {path: info.problem for path, info in images.items() if info.problem})
    check_not_among(target, set(images))
    is_unchanged = kind_of_file(source) == "jsonl" and target.suffix.lower() not in FILE_TYPES
    report = CleanReport(
        source,
        target,
        len(kept),
        is_unchanged,
        tuple(by_kind(malformed)),
        left_out,
        file.num_coerced,
        file.left_out_columns,
    )
    if not kept:
        raise RecordsError(f"{source} has no record that can be used, so {target} is not written\n{report.text()}")
    if is_unchanged:
        _copy_lines(source, target, kept, image_root)
    else:
        write_records(target, kept, image_root, absolute=image_root is None)
    return report


def _copy_lines(source: Path, target: Path, kept: list[Record], image_root: Path | None) -> None:
    """Copy the lines of the records that were kept, byte for byte."""
    numbers = {int(record.origin.rpartition(":")[2]) for record in kept}
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as temporary:
        with source.open("rb") as lines, temporary.open("wb") as file:
            file.writelines(line for number, line in enumerate(lines, start=1) if number in numbers)
        if image_root is None and os.path.abspath(source.parent) != os.path.abspath(target.parent):
            _check_images(temporary, kept, source, target)


def _check_images(written: Path, kept: list[Record], source: Path, target: Path) -> None:
    """Refuse lines whose image paths lead elsewhere from the folder of the new file."""
    again = RecordsFile(written, coerce_answers=True)
    if any(one.images != other.images for one, other in zip(kept, again, strict=True)):
        raise UsageError(
            f"image paths in {source} are relative to its folder, so the same lines in {target.parent} would lead "
            "elsewhere; write the new file beside it, or name the folder of the images with --image-root DIR here and "
            "as `data.image_root` in the run file"
        )
