"""Write the records of a file again in another format, or in another type of file: `lookonce data convert`.

Design: images stay where they are. The new file refers to them by a path relative to itself or to another image root,
and by an absolute path if they lie elsewhere. Only embedded images without a path (`data:` URLs, lists of embedded
images) are written to files, byte for byte, each once, under its image key. Records are read one by one and kept in
memory, some hundred bytes each; embedded bytes are not.

Answers that are points or boxes can change their unit, since each family of models was trained to write coordinates in
its own, and a fine-tuning in another has to unlearn it. Qwen3-VL writes parts of 1000, Qwen2.5-VL pixels of the image
as it was resized for the tower, OS-Atlas and ScreenSpot ratios. Only the numbers of an answer change, where they stand.
Rounding keeps the order of coordinates, so a point inside a box is inside after a conversion too. It costs half a unit
of the coarser of the two: pixels survive a way through ratios of four decimals for sides of less than 10,000 pixels,
and one through parts of 1000 for sides of at most 1,000. What shows that the unit is another one than was said is
refused: a number beyond the image, only ratios where there should be pixels, and a box whose right is left of its left,
which has a width and a height in place of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from itertools import count as count_up
from pathlib import Path
from re import Match
from typing import Literal, cast, get_args

from tqdm import tqdm

from lookonce.datasets.formats.image_references import suffix_of_bytes
from lookonce.datasets.formats.record import Record
from lookonce.datasets.formats.registry import FormatName
from lookonce.datasets.images import ImageInfo, Size, bytes_key, inspect_images
from lookonce.datasets.points import KEYED, NUMBER, reference_numbers
from lookonce.datasets.records import FILE_TYPES, RecordsFile, check_target, format_of_file, write_records
from lookonce.datasets.text_files import folder_in_place
from lookonce.errors import RecordsError, UsageError
from lookonce.files import atomic_write
from lookonce.text import count, located, quoted, rows

Unit = Literal["pixels", "ratio", "1000", "resized"]
"""Pixels of the file as it is shown, ratios of 0 to 1, parts of 1000, or pixels of the image that the model sees."""


@dataclass(frozen=True)
class Conversion:
    """From one unit to another."""

    source: Unit
    target: Unit
    resized: Callable[[Size], Size] | None = None
    """Width and height of an image that the model sees, by those of the file; the unit `resized` needs it."""

    @classmethod
    def parse(cls, text: str, resized: Callable[[Size], Size] | None = None) -> Conversion:
        """The conversion of a text such as "pixels:1000".

        Raises:
            UsageError: it is none, or needs a model.
        """
        source, _, target = text.partition(":")
        units = get_args(Unit)
        if source not in units or target not in units or source == target:
            raise UsageError(
                f"--points {text}: write FROM:TO, two different ones of {', '.join(units)}: --points pixels:1000"
            )
        if "resized" in (source, target) and resized is None:
            raise UsageError(f"--points {text}: `resized` depends on the model; add --model DIR, a model folder")
        return cls(cast(Unit, source), cast(Unit, target), resized)

    def sides(self, unit: Unit, size: Size) -> tuple[float, float]:
        """The width and height of an image of this many pixels, in a unit."""
        if unit == "pixels":
            return size
        if unit == "resized":
            assert self.resized
            return self.resized(size)
        return (1, 1) if unit == "ratio" else (1000, 1000)

    def of_text(self, text: str, size: Size, origin: str) -> str:
        """An answer about an image of this size, a point or a box, in the other unit.

        Raises:
            RecordsError: the numbers are not in the unit; names `origin`.
        """
        numbers, limits, sides = reference_numbers(text), self.sides(self.source, size), self.sides(self.target, size)
        if any(not 0 <= number <= limits[n % 2] for n, number in enumerate(numbers)):
            raise RecordsError(
                f"{origin}: {quoted(text)} is not in `{self.source}`, which is 0 to {limits[0]:g} and 0 to "
                f"{limits[1]:g} in this image of {size[0]} x {size[1]} pixels; name another unit in --points"
            )
        if len(numbers) == 4 and (numbers[2] < numbers[0] or numbers[3] < numbers[1]):
            raise RecordsError(
                f"{origin}: {quoted(text)} is no box of left, top, right and bottom; write one of left, top, width and "
                "height so first"
            )
        positions = count_up()

        def changed(match: Match[str]) -> str:
            axis = next(positions) % 2
            value = float(match[0]) / limits[axis] * sides[axis]
            return f"{value:.4f}" if self.target == "ratio" else f"{round(value)}"

        if len(KEYED.findall(text)) == 1:  # numbers beside the point or the box, such as in a label, stay
            return KEYED.sub(lambda keyed: keyed[0].replace(keyed[1], NUMBER.sub(changed, keyed[1])), text)
        return NUMBER.sub(changed, text)


def convert_points(records: Sequence[Record], conversion: Conversion) -> tuple[list[Record], int]:
    """The records with their points and boxes in another unit, also those in `references`; and how many texts changed.

    Answers that are neither stay.

    Raises:
        RecordsError: there is no point; or a record with one has not one image, an image that cannot be read, or
            numbers in another unit.
    """
    has_points = [any(map(reference_numbers, _answers(record))) for record in records]
    pointed = list(compress(records, has_points))
    if not pointed:
        raise RecordsError("--points: no answer is a point or a box, such as (120, 34); leave the option out")
    for record in pointed:
        if len(record.images) != 1:
            raise RecordsError(f"{record.origin}: its answer is a point, and it has {len(record.images)} images, not 1")
    largest = max(number for record in pointed for text in _answers(record) for number in reference_numbers(text))
    if largest <= 1 and conversion.source != "ratio":
        raise RecordsError(
            f"--points: no number is above 1, so these are ratios and not `{conversion.source}`; write: "
            f"--points ratio:{conversion.target}"
        )
    images = inspect_images(record.images[0] for record in pointed)
    pairs = zip(records, has_points, strict=True)
    done = [_converted(record, conversion, images) if has_point else record for record, has_point in pairs]
    return done, sum(bool(reference_numbers(text)) for record in pointed for text in _answers(record))


def _answers(record: Record) -> Iterable[str]:
    """The answers, and other right ones than the first, which is the answer."""
    return (*(turn.answer for turn in record.turns), *record.references[1:])


def _converted(record: Record, conversion: Conversion, images: Mapping[Path, ImageInfo]) -> Record:
    image = images[record.images[0]]
    if image.size is None:
        raise RecordsError(f"{record.origin}: {image.problem}; its points cannot be converted without its size")
    size = image.size

    def of(text: str) -> str:
        return conversion.of_text(text, size, record.origin) if reference_numbers(text) else text

    references = {"references": [of(text) for text in record.references]} if record.references else {}
    turns = tuple(replace(turn, answer=of(turn.answer)) for turn in record.turns)
    return replace(record, turns=turns, metadata={**record.metadata, **references})


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
    images_folder: Path
    num_embedded: int
    """Distinct images that were embedded."""
    num_written: int
    """Embedded images that were not there before."""
    num_coerced: int = 0
    """Answers that were numbers or booleans, now text."""
    left_out_columns: tuple[str, ...] = ()
    """Columns of the source that hold bytes, such as masks."""
    num_points: int = 0
    """Points and boxes that now have another unit."""

    def text(self) -> str:
        lines = [
            ("read", f"{self.source}, {self.source_form}"),
            ("wrote", f"{self.target}, {self.target_form}"),
            ("records", f"{self.num_records:,}, {count(self.num_turns, 'question')}"),
            ("images", f"{count(self.num_images, 'file')} named in the records"),
        ]
        if self.num_coerced:
            lines.append(("numbers", f"{count(self.num_coerced, 'answer')} now text instead of a number or boolean"))
        if self.num_points:
            lines.append(("points", f"{self.num_points:,} points and boxes in the other unit"))
        if self.left_out_columns:
            lines.append(("left out", f"columns of bytes: {', '.join(self.left_out_columns)}"))
        if self.num_embedded:
            there = self.num_embedded - self.num_written
            before = f", {there:,} there before" if there else ""
            lines.append(("embedded", f"{count(self.num_written, 'file')} written to {self.images_folder}{before}"))
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
            path = Path(os.path.abspath(self.folder), key + (suffix_of_bytes(data) or UNKNOWN_SUFFIX))
            if not (path.exists() and path.read_bytes() == data):
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(path, len(data), flushes=False) as temporary:
                    temporary.write_bytes(data)
                self.num_new += 1
            self.written[key] = path
        return self.written[key]


def convert(
    source: Path,
    target: Path,
    *,
    source_format: FormatName | None = None,
    target_format: FormatName | None = None,
    image_root: Path | None = None,
    target_root: Path | None = None,
    coerce_answers: bool = False,
    points: Conversion | None = None,
    overwrite: bool = False,
) -> ConvertReport:
    """Write the records of `source` to `target` in another format, or in another type of file.

    The image paths of `source` are relative to `image_root`, those of `target` to `target_root`. Without it they are
    relative to its own folder, and images elsewhere get absolute paths. `coerce_answers` writes answers that are
    numbers or booleans as text. `points` is the other unit of answers that are points or boxes.

    Raises:
        UsageError: there is no `source`; or `target` exists, has an unknown suffix, or is an archive with images of
            the records.
        RecordsError: a record cannot be read, its points are in another unit, or the format cannot hold it; names the
            record.
    """
    if not source.exists() or source.is_dir():
        advice = f": {folder_in_place(source)}" if source.is_dir() else "; name a JSONL, JSON, CSV or parquet file"
        raise UsageError(f"no records file at {located(source)}{advice}")
    check_target(target, source, (".jsonl", *FILE_TYPES), overwrite=overwrite)
    written_format = format_of_file(target, target_format)
    extractor = Extractor((target_root or target.parent) / IMAGES)
    file = RecordsFile(source, image_root, format=source_format, keep=extractor.keep, coerce_answers=coerce_answers)
    records = list(tqdm(file, desc="read records", unit="record", leave=False, disable=None))
    records, num_points = convert_points(records, points) if points else (records, 0)
    images = {image for record in records for image in record.images}
    path = Path(os.path.abspath(target))
    if path.exists() and any(image == path or path in image.parents for image in images):
        raise UsageError(f"{target} holds images of these records; name another file to write")
    write_records(target, records, target_root, format=target_format, absolute=target_root is None)
    return ConvertReport(
        source,
        file.format or "",
        target,
        written_format,
        len(records),
        sum(len(record.turns) for record in records),
        len(images),
        extractor.folder,
        len(extractor.written),
        extractor.num_new,
        file.num_coerced,
        file.left_out_columns,
        num_points,
    )
