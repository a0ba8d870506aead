"""The finished chunks of an unfinished `prepare`, from which the next one resumes.

    DIR/.prepare/claim.json             the process that prepares the folder
    DIR/.prepare/settings.json          the dataset definition, the source and the options
    DIR/.prepare/portion-00012.json     the rows of a chunk, and the images that came with them

Design: a chunk's file is written when all of its images are on the disk, so that it is true after a power cut. A chunk
counts as finished only if its image files still exist with the right size. The names of images depend on those before
them, so chunks are finished in order, and a run resumes at the first that is missing. The journal is removed when the
records are written; `report.json` then says what was prepared.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lookonce.claim_file import FolderClaim
from lookonce.datasets.prepare.images import Stored, clear_leftovers
from lookonce.datasets.prepare.rows import Row
from lookonce.differences import Difference, differences
from lookonce.errors import UsageError
from lookonce.files import read_object, write_json, write_text
from lookonce.text import count

IMAGES = "images"
REPORT = "report.json"
WORK = ".prepare"
FIELDS = [field.name for field in fields(Row)]


class Journal:
    """The work folder of a dataset that is being prepared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / WORK
        self.images = folder / IMAGES

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside this context, no other process prepares this folder.

        Raises:
            UsageError: another process does.
        """
        with FolderClaim(self.work / "claim.json", "lookonce data prepare") as claim:
            if used_by := claim.take():
                raise UsageError(f"{self.folder} is in use by {used_by}; wait until it has ended, or stop it")
            yield

    def begin(self, settings: Mapping[str, Any]) -> str:
        """Begin, or resume what was begun with the same settings; returns a note if that was begun with others.

        What was not finished with other settings is removed: a try that failed does not refuse the next one.
        """
        path = self.work / "settings.json"
        begun = read_object(path)
        if begun and not differing_settings(begun, settings):
            if self.images.exists():
                clear_leftovers(self.folder)
                clear_leftovers(self.images)
            return ""
        for part in self.work.glob("portion-*.json"):
            part.unlink()
        shutil.rmtree(self.images, ignore_errors=True)
        write_json(path, settings)
        return f"{self.folder} held an unfinished preparation with other settings, which is replaced" if begun else ""

    def done(self) -> tuple[int, list[Stored], dict[str, Stored]]:
        """The number of finished chunks, their images, and the image of each file of the source."""
        images: dict[str, Stored] = {}
        files: dict[str, Stored] = {}
        number = 0
        while (path := self._chunk_file(number)).exists():
            value = json.loads(path.read_text(encoding="utf-8"))
            new = [Stored(*image) for image in value["images"]]
            if not all(self._is_there(image) for image in new):
                break
            images |= {image.key: image for image in new}
            files |= {name: images[key] for name, key in value["files"].items()}
            number += 1
        return number, list(images.values()), files

    def write(
        self,
        number: int,
        rows: Sequence[Row],
        images: Sequence[Stored],
        files: Mapping[str, Stored],
        columns: Iterable[str],
    ) -> None:
        """Record a finished chunk; `columns` are those of its rows and of all rows before it."""
        value = {
            "images": images,
            "files": {name: image.key for name, image in files.items()},
            "columns": sorted(columns),
            "rows": [[getattr(row, name) for name in FIELDS] for row in rows],
        }
        write_text(self._chunk_file(number), json.dumps(value, ensure_ascii=False, default=str))

    def read(self) -> tuple[list[Row], list[str]]:
        """All rows in the order of the source, and the columns that they have there."""
        rows: list[Row] = []
        columns: set[str] = set()
        number = 0
        while (path := self._chunk_file(number)).exists():
            value = json.loads(path.read_text(encoding="utf-8"))
            rows += [Row(**dict(zip(FIELDS, values, strict=True))) for values in value["rows"]]
            columns |= set(value["columns"])
            number += 1
        return rows, sorted(columns)

    def clear(self) -> None:
        """Remove the journal of a complete dataset."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _is_there(self, image: Stored) -> bool:
        try:
            return (self.images / image.name).stat().st_size == image.size_bytes
        except OSError:
            return False

    def _chunk_file(self, number: int) -> Path:
        return self.work / f"portion-{number:05d}.json"


def differing_settings(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """How settings differ from those that were written."""
    return differences(found, json.loads(json.dumps(wanted, default=str)))  # as it is read back


def check_settings(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a complete dataset of other settings.

    Raises:
        UsageError: they differ; names the keys.
    """
    differing = differing_settings(found, wanted)
    if not differing:
        return
    shown = "\n".join(f"  {name}: {there!r} there, {now!r} now" for name, there, now in differing[:5])
    raise UsageError(
        f"{folder} was prepared with other settings, {count(len(differing), 'difference')}:\n{shown}\n"
        "Choose another folder, or remove this one"
    )
