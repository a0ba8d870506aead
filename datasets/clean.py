"""Write the records that a training can use: without malformed ones, and without those of broken images.

Design: nothing is mended, only left out, and everything left out is in the report. What is kept of JSONL keeps its
bytes, so that the two files can be compared line by line. Other kinds of files are written in the canonical format, or
flat in CSV. Images are decoded whole by default, as a cache will do it, because the header of a truncated file is fine.
Records are in memory, some hundred bytes each; images are not.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.datasets.audit.corpus import inspect_images
from lookonce.datasets.convert import check_not_among, check_paths
from lookonce.datasets.malformed import Collector, MalformedKind, by_kind
from lookonce.datasets.records import SUFFIXES, Record, RecordsFile, write_records
from lookonce.datasets.text_files import kind_of_file
from lookonce.datasets.usable import LeftOut, leave_out
from lookonce.errors import RecordsError, UsageError
from lookonce.files import atomic_write
from lookonce.text import count, rows

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
        kinds = [f"  {kind.text()}" for kind in self.malformed[:NUM_KINDS]]
        more = len(self.malformed) - NUM_KINDS
        kinds += [f"  and {count(more, 'other mistake')}"] if more > 0 else []
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
    which a run then reads with `data.coerce_answers: true`.

    Raises:
        UsageError: there is no `source`; or `target` exists, has an unknown suffix, is an archive with images of the
            records, or lies in another folder than the images are relative to.
        RecordsError: `source` cannot be read as text, or no record of it can be used.
    """
    check_paths(source, target, overwrite)
    malformed = Collector()
    file = RecordsFile(source, image_root, coerce_answers=coerce_answers, broken=malformed)
    records = list(tqdm(file, desc="read records", unit="record", leave=False, disable=None))
    images = inspect_images((image for record in records for image in record.images), decode=decode)
    kept, left_out = leave_out(records, {path: info.problem for path, info in images.items() if info.problem})
    check_not_among(target, set(images))
    is_unchanged = kind_of_file(source) == SUFFIXES.get(target.suffix.lower(), "jsonl") == "jsonl"
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
