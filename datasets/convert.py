"""Convert records from one format into another, and extract embedded images.

Design: images stay where they are. The new file refers to them by a path relative to itself or to another image root,
and by an absolute path if they lie elsewhere. Only embedded images without a path (`data:` URLs, lists of embedded
images) are written to files, byte for byte, each once, under its image key. Records are read one by one and kept in
memory, some hundred bytes each; embedded bytes are not.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from lookonce.datasets.divide import Division, Part, divide, num_images, part_paths
from lookonce.datasets.formats.image_references import suffix_of_format
from lookonce.datasets.formats.registry import FormatName
from lookonce.datasets.images import UNDECODABLE, bytes_key
from lookonce.datasets.records import SUFFIXES, Record, RecordsFile, format_of_file, write_records
from lookonce.datasets.text_files import folder_in_place
from lookonce.errors import UsageError
from lookonce.files import atomic_write
from lookonce.text import Notify, count, located, quiet, rows

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
            *(("wrote", f"{path}, {self.target_form}") for path in ([self.target] if not self.parts else ())),
            *(
                (
                    one.name,
                    f"{one.path}, {self.target_form}: {count(one.num_records, 'record')}, "
                    f"{count(one.num_images, 'image')}",
                )
                for one in self.parts
            ),
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
    images = {image for record in records for image in record.images}
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
        _count(records, 2),
        len(records) - _count(records, 1),
        extractor.folder,
        len(extractor.written),
        extractor.num_new,
        sum(path.suffix == UNKNOWN_SUFFIX for path in extractor.written.values()),
        file.num_coerced,
        file.left_out_columns,
        tuple(Part(part, paths[part], len(some), num_images(some)) for part, some in parts.items() if part),
    )


def _count(records: list[Record], num_images: int) -> int:
    return sum(len(record.images) >= num_images for record in records)


def check_paths(source: Path, target: Path, overwrite: bool) -> None:
    """Check the two files of a command that reads records and writes others.

    Raises:
        UsageError: there is no `source`; or `target` is the same file, exists, or has an unknown suffix.
    """
    if source.is_dir():
        raise UsageError(f"no records file at {located(source)}: {folder_in_place(source)}")
    if not source.exists():
        raise UsageError(f"no records file at {located(source)}; name a JSONL, JSON, CSV or parquet file")
    allowed = (".jsonl", *SUFFIXES)
    if target.suffix.lower() not in allowed:
        raise UsageError(f"{target}: the suffix decides the type of file to write; name one with {', '.join(allowed)}")
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target} is also the file to read; name another file to write")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; name another file, or replace it with --overwrite")


def check_not_among(target: Path, images: set[Path]) -> None:
    """Check that a file to be written is not an image of the records, or an archive of them.

    Raises:
        UsageError: it is.
    """
    path = Path(os.path.abspath(target))
    if path.exists() and any(image == path or path in image.parents for image in images):
        raise UsageError(f"{target} holds images of these records; name another file to write")
