"""What lies at a path: in which form, in which files.

Design: the form is seen from what is there, the first of those below that a folder holds, so nobody has to name it;
`--format` decides where a folder holds several. A source is known by the names and sizes of its files: if these change
under an unfinished preparation, it is not gone on with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.chunks import Portion, Reader
from lookonce.datasets.prepare.definition import Definition
from lookonce.datasets.prepare.parquet_files import read_parquet
from lookonce.datasets.prepare.splits import part_of
from lookonce.datasets.prepare.tar_files import holds_questions, read_tar
from lookonce.datasets.prepare.text_files import field_values, read_csv, read_json, read_text
from lookonce.errors import SourceError, UsageError

SUFFIXES = {"parquet": (".parquet",), "tar": (".tar",), "csv": (".csv",), "json": (".jsonl", ".json")}
"""In the order in which they are looked for, after text files if the definition has some."""
READERS: dict[str, Reader] = {
    "text": read_text,
    "parquet": read_parquet,
    "tar": read_tar,
    "csv": read_csv,
    "json": read_json,
}
FORMATS = tuple(READERS)
NOT_ROWS = ("report.json", "dataset_infos.json", "dataset_info.json")
"""JSON files beside the rows that are not rows."""


@dataclass(frozen=True)
class Source:
    """Files with the rows of a set."""

    place: str
    """What the user named: a path, or the set's name on the Hub."""
    form: str
    root: Path
    """What the names of files are relative to."""
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    image_roots: tuple[Path, ...]
    """Where images are looked for that are not embedded."""
    revision: str | None = None
    licence: str | None = None
    """As the Hub has it."""
    left: tuple[str, ...] = field(default=())
    """Files of other forms that were left alone."""

    def identity(self) -> dict[str, Any]:
        """What the rows are read from."""
        files = dict(zip(self.files, self.sizes, strict=True))
        return {"form": self.form, "revision": self.revision, "files": files}

    def portions(self, definition: Definition) -> Iterator[tuple[str, Portion]]:
        """The portions of all files in order, each with the part of the split that its file's name says."""
        for name in self.files:
            part = _part_of_file(name)
            for portion in READERS[self.form](self.root / name, name, definition):
                yield part, portion


def find_source(path: Path, definition: Definition, form: str | None = None, image_root: Path | None = None) -> Source:
    """The source at a path.

    Raises:
        SourceError: there is nothing, or nothing with rows.
        UsageError: the image root is no folder.
    """
    if not path.exists():
        raise SourceError(f"there is nothing at {path}; name a folder, a file, or a set on the Hub as owner/name")
    if image_root is not None and not image_root.is_dir():
        raise UsageError(f"--image-root {image_root} is no folder")
    if path.is_file():
        root, found = path.parent, {_form_of(path.name): [path.name]}
    else:
        root, found = path, _by_form(path, definition)
    found.pop("", None)
    chosen = form or next((each for each in FORMATS if each in found), None)
    if chosen not in found:
        wanted = f"{form} files" if form else "parquet, WebDataset tar, CSV, JSONL or JSON files"
        raise SourceError(f"{path} holds no {wanted} with questions; {_where_from(definition)}")
    files = _chosen(found[chosen], definition.files)
    return Source(
        place=str(path),
        form=chosen,
        root=root,
        files=tuple(files),
        sizes=tuple((root / name).stat().st_size for name in files),
        image_roots=tuple(dict.fromkeys(place for place in (image_root, root) if place is not None)),
        left=tuple(sorted(name for each, names in found.items() if each != chosen for name in names)),
    )


def _by_form(folder: Path, definition: Definition) -> dict[str, list[str]]:
    """The names of all files below a folder that may hold rows, sorted, by their form."""
    found: dict[str, list[str]] = {}
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            relative = Path(place, name).relative_to(folder).as_posix()
            form = _form_of(name)
            if definition.text and field_values(definition.text, relative):
                form = "text"
            if form and not name.startswith(".") and name not in NOT_ROWS:
                found.setdefault(form, []).append(relative)
    if not any(holds_questions(folder / name) for name in found.get("tar", ())[:1]):
        found.pop("tar", None)
    return {form: sorted(names, key=_by_numbers) for form, names in found.items()}


def _form_of(name: str) -> str:
    suffix = Path(name).suffix.lower()
    return next((form for form, suffixes in SUFFIXES.items() if suffix in suffixes), "")


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """Sorts `seq_2` before `seq_10`."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", name)]


def _chosen(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Those that fit one of a definition's patterns, or all where none fits: people have other layouts."""
    fitting = [name for name in names if any(Path(name).match(pattern) for pattern in patterns)]
    return fitting or list(names)


def _part_of_file(name: str) -> str:
    """The part that a file's name begins with, or its folder's: `data/train-00000.parquet`, `test/a.tar`."""
    for piece in reversed(name.split("/")):
        part = part_of(re.split(r"[-_.]", piece)[0]) or part_of(re.split(r"[-_.]", Path(piece).stem)[-1])
        if part:
            return part
    return ""


def _where_from(definition: Definition) -> str:
    if definition.text:
        return f"{definition.name} is text files {definition.text.files}; see {definition.homepage}"
    return f"see {definition.homepage}" if definition.homepage else "name its folder with --source"
