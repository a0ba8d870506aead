"""Records from one form into another, and embedded images out of them.

Design: images stay where they are, and what is written names them there: by their path relative to the new file or to
another image root, by their whole path where they lie elsewhere. Only bytes that no path leads to, `data:` URLs and
lists of embedded images, are written out, byte for byte, each once, under its image key. Records are read one by one
and stay in memory, some hundred bytes each; embedded bytes do not.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from lookonce.datasets.formats.registry import FormName
from lookonce.datasets.images import UNDECODABLE, bytes_key
from lookonce.datasets.records import Record, RecordsFile, form_of_file, write_records
from lookonce.errors import UsageError
from lookonce.files import temporary_name
from lookonce.text import count, rows

SUFFIX = {"JPEG": ".jpg", "MPO": ".jpg", "PNG": ".png", "GIF": ".gif", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tif"}
UNKNOWN_SUFFIX = ".bin"
"""Of bytes that are no image; whoever reads them says so."""
IMAGES = "images"
"""The folder beside the records that embedded images are written to."""


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
    """Records without."""
    images_folder: Path
    num_embedded: int
    """Distinct images that were embedded."""
    num_written: int
    """Of these, those that were not there already."""
    num_unknown: int
    """Of these, those that are no image of a known format."""

    def text(self) -> str:
        several, none = self.num_several_images, self.num_text_only
        shown = [(several, "with several"), (none, "without any")]
        kinds = ", ".join(f"{count(number, 'record')} {what}" for number, what in shown if number)
        lines = [
            ("read", f"{self.source}, {self.source_form}"),
            ("wrote", f"{self.target}, {self.target_form}"),
            ("records", f"{self.num_records:,}, {count(self.num_turns, 'question')}"),
            ("images", f"{self.num_images:,} files named" + (f"; {kinds}" if kinds else "")),
        ]
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
    """By image key, those that were there already among them."""
    num_new: int = 0

    def keep(self, data: bytes) -> Path:
        """Write an image, unless it is there; gives its path.

        Without waiting for the disk, which would be most of the time: a file is whole after a kill, and one that a
        power cut has spoiled is found by its content and written again.
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
        temporary = temporary_name(path)
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self.num_new += 1


def _suffix(data: bytes) -> str:
    try:
        with Image.open(io.BytesIO(data)) as image:
            name = image.format or ""
    except (*UNDECODABLE, MemoryError):
        return UNKNOWN_SUFFIX
    return SUFFIX.get(name, f".{name.lower()}")


def convert(
    source: Path,
    target: Path,
    *,
    source_form: FormName | None = None,
    target_form: FormName | None = None,
    image_root: Path | None = None,
    target_root: Path | None = None,
    overwrite: bool = False,
) -> ConvertReport:
    """Write the records of `source` to `target` in another form, or in another kind of file.

    `image_root` is what the image paths of `source` are relative to, `target_root` what those of `target` are to be
    relative to; without it, to its own folder, and images elsewhere are named by their whole path.

    Raises:
        UsageError: there is no `source`, `target` is there already, or is what images are read from.
        RecordsError: a record can not be read, or not be held by the form; names it.
    """
    _check_places(source, target, overwrite)
    written_form = form_of_file(target, target_form)
    extractor = Extractor((target_root or target.parent) / IMAGES)
    file = RecordsFile(source, image_root, form=source_form, keep=extractor.keep)
    records = list(tqdm(file, desc="read records", unit="record", leave=False, disable=None))
    images = {image for record in records for image in record.images}
    _check_not_among(target, images)
    write_records(target, records, target_root, form=target_form, absolute=target_root is None)
    return ConvertReport(
        source,
        file.form or "",
        target,
        written_form,
        len(records),
        sum(len(record.turns) for record in records),
        len(images),
        _count(records, 2),
        len(records) - _count(records, 1),
        extractor.folder,
        len(extractor.written),
        extractor.num_new,
        sum(path.suffix == UNKNOWN_SUFFIX for path in extractor.written.values()),
    )


def _count(records: list[Record], num_images: int) -> int:
    return sum(len(record.images) >= num_images for record in records)


def _check_places(source: Path, target: Path, overwrite: bool) -> None:
    if not source.is_file():
        raise UsageError(f"no records file at {source.absolute()}; name a JSONL, JSON, CSV or parquet file")
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target} is what is read; name another file to write")
    if target.exists() and not overwrite:
        raise UsageError(f"{target} exists; name another file, or replace it with --overwrite")


def _check_not_among(target: Path, images: set[Path]) -> None:
    whole = Path(os.path.abspath(target))
    if whole.exists() and any(image == whole or whole in image.parents for image in images):
        raise UsageError(f"{target} holds images of these records; name another file to write")
