"""The files of a dataset, at a path or downloaded from the Hub.

Design: the file format is the first of those below that a folder has, so users need not name it; `--format` chooses if
a folder has several. A source is identified by the names and sizes of its files: if they change during an unfinished
preparation, it is not resumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.chunks import (
    Chunk,
    Reader,
    csv_chunks,
    field_values,
    json_chunks,
    parquet_chunks,
    tar_chunks,
    text_chunks,
)
from lookonce.datasets.prepare.definition import Definition, HubSection
from lookonce.datasets.prepare.splits import part_of
from lookonce.datasets.readers.file_kind import kind_of_file
from lookonce.datasets.readers.tar import has_json
from lookonce.errors import SourceError, UsageError
from lookonce.files import files_below
from lookonce.hub import download_dataset

SUFFIXES = {"parquet": (".parquet",), "tar": (".tar",), "csv": (".csv", ".tsv"), "json": (".jsonl", ".json")}
"""File formats in order of preference, after text files if the definition has some."""
READERS: dict[str, Reader] = {
    "text": text_chunks,
    "parquet": parquet_chunks,
    "tar": tar_chunks,
    "csv": csv_chunks,
    "json": json_chunks,
}
FORMATS = tuple(READERS)
NOT_ROWS = ("report.json", "dataset_infos.json", "dataset_info.json")
"""JSON files that may lie beside the rows and hold none."""


@dataclass(frozen=True)
class Source:
    """The files with the rows of a dataset."""

    location: str
    """A path, or the dataset's name on the Hub."""
    format: str
    root: Path
    """The folder that the names of files are relative to."""
    files: tuple[str, ...]
    sizes: tuple[int, ...]
    image_roots: tuple[Path, ...]
    """The folders that are searched for images that are not embedded."""
    revision: str | None = None
    licence: str | None = None
    """The licence that the Hub names."""
    ignored: tuple[str, ...] = field(default=())
    """Files of other formats."""

    def identity(self) -> dict[str, Any]:
        """The values that identify the source."""
        files = dict(zip(self.files, self.sizes, strict=True))
        return {"form": self.format, "revision": self.revision, "files": files}

    def chunks(self, definition: Definition) -> Iterator[tuple[str, Chunk]]:
        """The chunks of all files in order, each with the part of the split that its file's name says."""
        for name in self.files:
            part, path = _part_of_file(name), self.root / name
            if self.format in ("parquet", "csv", "json") and path.stat().st_size:
                kind_of_file(path)
            for chunk in READERS[self.format](self.root / name, name, definition):
                yield part, chunk


def download_source(
    hub: HubSection,
    definition: Definition,
    revision: str | None = None,
    format: str | None = None,
    image_root: Path | None = None,
) -> Source:
    """The source of a dataset on the Hub, after its files were downloaded.

    Raises:
        SourceError: it is not available.
    """
    found = download_dataset(hub.id, revision or hub.revision, hub.files)
    source = find_source(found.folder, definition, format, image_root)
    return replace(source, location=hub.id, revision=found.commit, licence=found.license)


def find_source(
    path: Path, definition: Definition, format: str | None = None, image_root: Path | None = None
) -> Source:
    """The source at a path.

    Raises:
        SourceError: no file there has rows.
        UsageError: the image root is not a folder.
    """
    if not path.exists():
        raise SourceError(f"nothing exists at {path}; name a folder, a file, or a dataset on the Hub as owner/name")
    if image_root is not None and not image_root.is_dir():
        raise UsageError(f"--image-root {image_root} is not a folder")
    if path.is_file():
        root, found = path.parent, {_format_of(path.name): [path.name]}
        if "" in found:
            kind_of_file(path)  # its error says what another file is
    else:
        root, found = path, _by_format(path, definition)
    found.pop("", None)
    chosen = format or next((each for each in FORMATS if each in found), None)
    if chosen not in found:
        wanted = f"{format} files" if format else "parquet, WebDataset tar, CSV, JSONL or JSON files"
        raise SourceError(f"{path} has no {wanted} with questions; {_where_from(definition)}")
    files = _chosen(found[chosen], definition.files)
    return Source(
        location=str(path),
        format=chosen,
        root=root,
        files=tuple(files),
        sizes=tuple((root / name).stat().st_size for name in files),
        image_roots=tuple(dict.fromkeys(folder for folder in (image_root, root) if folder is not None)),
        ignored=tuple(sorted(name for each, names in found.items() if each != chosen for name in names)),
    )


def _by_format(folder: Path, definition: Definition) -> dict[str, list[str]]:
    """The names of all files below a folder that may hold rows, sorted, by their format."""
    found: dict[str, list[str]] = {}
    for path in files_below(folder):
        relative = path.relative_to(folder).as_posix()
        format = _format_of(path.name)
        if definition.text and field_values(definition.text, relative):
            format = "text"
        if format and path.name not in NOT_ROWS:
            found.setdefault(format, []).append(relative)
    if not any(has_json(folder / name) for name in found.get("tar", ())[:1]):
        found.pop("tar", None)
    return {format: sorted(names, key=_by_numbers) for format, names in found.items()}


def _format_of(name: str) -> str:
    suffix = Path(name).suffix.lower()
    return next((format for format, suffixes in SUFFIXES.items() if suffix in suffixes), "")


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key that puts `seq_2` before `seq_10`."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", name)]


def _chosen(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that match one of the definition's patterns, or all if none does: local copies have other layouts."""
    matching = [name for name in names if any(Path(name).match(pattern) for pattern in patterns)]
    return matching or list(names)


def _part_of_file(name: str) -> str:
    """The part that a file's or a folder's name begins or ends with: `data/train-00000.parquet`, `test/a.tar`."""
    for piece in reversed(name.split("/")):
        part = part_of(re.split(r"[-_.]", piece)[0]) or part_of(re.split(r"[-_.]", Path(piece).stem)[-1])
        if part:
            return part
    return ""


def _where_from(definition: Definition) -> str:
    if definition.text:
        return f"{definition.name} has text files {definition.text.files}; see {definition.homepage}"
    return f"see {definition.homepage}" if definition.homepage else "name its folder with --source"
