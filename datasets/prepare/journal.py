"""What an unfinished `prepare` has done, so that the next one goes on.

    DIR/.prepare/settings.json          what is being prepared, from what, and how
    DIR/.prepare/portion-00012.json     the rows of a portion, and the images that came with them; after these

Design: a portion's file is written when all of its images are on the disk, so that what it says is true after a power
cut. What is done is trusted only as far as its image files are still there in their size. The names of images depend on
those before them, so portions are done in order, and the first that is missing is where it goes on. All of it is
removed when the records are written; `report.json` then says what was prepared.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.images import Stored, clear_leftovers
from lookonce.datasets.prepare.rows import Row
from lookonce.differences import differences
from lookonce.errors import UsageError
from lookonce.files import write_json, write_text

IMAGES = "images"
REPORT = "report.json"
WORK = ".prepare"
FIELDS = [field.name for field in fields(Row)]


class Journal:
    """The work folder of a set that is being prepared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / WORK
        self.images = folder / IMAGES

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this lasts, no other process prepares this folder.

        Raises:
            UsageError: another one does.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"{self.folder} is being prepared by another process; wait for it") from None
            yield

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin, or go on with the same settings.

        Raises:
            UsageError: something else was begun here.
        """
        path = self.work / "settings.json"
        if path.exists():
            check_settings(self.folder, json.loads(path.read_text(encoding="utf-8")), settings)
            if self.images.exists():
                clear_leftovers(self.folder)
                clear_leftovers(self.images)
        else:
            write_json(path, settings)

    def done(self) -> tuple[int, list[Stored], dict[str, Stored]]:
        """How many portions are done, their images, and which image is which file of the source."""
        images: dict[str, Stored] = {}
        files: dict[str, Stored] = {}
        number = 0
        while (path := self._portion(number)).exists():
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
        """Note that a portion is done; `columns` are those that its rows had, or rows before it."""
        value = {
            "images": images,
            "files": {name: image.key for name, image in files.items()},
            "columns": sorted(columns),
            "rows": [[getattr(row, name) for name in FIELDS] for row in rows],
        }
        write_text(self._portion(number), json.dumps(value, ensure_ascii=False, default=str))

    def read(self) -> tuple[list[Row], list[str]]:
        """All rows, in the order of the source, and the columns that they had there."""
        rows: list[Row] = []
        columns: set[str] = set()
        number = 0
        while (path := self._portion(number)).exists():
            value = json.loads(path.read_text(encoding="utf-8"))
            rows += [Row(**dict(zip(FIELDS, values, strict=True))) for values in value["rows"]]
            columns |= set(value["columns"])
            number += 1
        return rows, sorted(columns)

    def clear(self) -> None:
        """Remove it; the set is complete."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _is_there(self, image: Stored) -> bool:
        try:
            return (self.images / image.name).stat().st_size == image.size_bytes
        except OSError:
            return False

    def _portion(self, number: int) -> Path:
        return self.work / f"portion-{number:05d}.json"


def check_settings(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings.

    Raises:
        UsageError: they differ; names where.
    """
    wanted = json.loads(json.dumps(wanted, default=str))  # as it is read back
    differing = differences(found, wanted)
    if not differing:
        return
    shown = "\n".join(f"  {name}: {there!r} there, {now!r} now" for name, there, now in differing[:5])
    more = f"\n  and {len(differing) - 5} more" if len(differing) > 5 else ""
    raise UsageError(
        f"{folder} holds, or was begun with, another preparation:\n{shown}{more}\n"
        "Choose another folder, or remove this one"
    )
