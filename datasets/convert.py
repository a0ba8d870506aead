"""Write the records of a file again in another format, or in another type of file: `lookonce data convert`.

Design: images stay where they are; the new file refers to them. Only embedded images without a path (`data:` URLs,
lists of embedded images) are written to files, byte for byte, each once, under its image key. Records are kept in
memory, some hundred bytes each; embedded bytes are not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from lookonce.datasets.formats.image_references import suffix_of_bytes
from lookonce.datasets.formats.registry import FormatName
from lookonce.datasets.images import bytes_key
from lookonce.datasets.point_units import Conversion, Converted, convert_points
from lookonce.datasets.records import FILE_TYPES, RecordsFile, check_target, format_of_file, write_records
from lookonce.datasets.text_files import folder_in_place
from lookonce.errors import UsageError
from lookonce.files import atomic_write
from lookonce.text import count, located, rows

UNKNOWN_SUFFIX = ".bin"
"""The suffix of embedded bytes that are not a known image format; reading them as an image reports that."""
IMAGES = "images"


@dataclass(frozen=True)
class ConvertReport:
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
    num_written: int
    """Embedded images that were not there before."""
    num_coerced: int = 0
    """Answers that were numbers or booleans, now text."""
    left_out_columns: tuple[str, ...] = ()
    """Columns of the source that hold bytes, such as masks."""
    num_points: int = 0
    """Answers and references that are points or boxes and now have another unit."""
    num_points_left: int = 0
    """Texts that keep their unit although they seem to have coordinates among words."""
    first_left: str = ""
    """Where the first of them is, and the text."""

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
            lines.append(("points", f"{count(self.num_points, 'answer')} with points or boxes in the other unit"))
        if self.num_points_left:
            texts = f"{count(self.num_points_left, 'text')} with coordinates in a question or among words"
            lines.append(("as before", f"{texts}, such as {self.first_left}"))
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
    converted = convert_points(records, points) if points else Converted(records)
    records = converted.records
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
        converted.num_texts,
        len(converted.left),
        converted.left[0] if converted.left else "",
    )
