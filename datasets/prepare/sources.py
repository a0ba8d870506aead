"""The files of a dataset, at a path or downloaded from the Hub, and their rows.

Files are parquet, WebDataset tars, CSV, JSON, JSONL, or question|answer lines.

Design: the file format is the first of `FORMATS` that a folder has, so users need not name it; `--format` chooses if a
folder has several. A source is identified by the names and sizes of its files. Embedded images are the bytes of the
file, never decoded. Values are strict, as records are: an error names file and line.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookonce.datasets.archives import DAMAGED, has_json, read_samples
from lookonce.datasets.formats.image_references import SUFFIXES
from lookonce.datasets.parquet import byte_columns, image_columns, open_parquet, read_rows
from lookonce.datasets.prepare.definition import Definition, HubSection, TextSection
from lookonce.datasets.prepare.rows import part_of
from lookonce.datasets.text_files import (
    decode_json,
    is_array,
    is_json,
    kind_of_file,
    not_utf8,
    read_array,
    read_csv,
    read_head,
    read_jsonl,
)
from lookonce.errors import RecordsError, SourceError, UsageError
from lookonce.files import files_below
from lookonce.hub import download_dataset
from lookonce.text import first_line, one_line


@dataclass(frozen=True)
class RawRow:
    """One row as the file has it."""

    values: dict[str, Any]
    image: bytes | None
    """The embedded image."""
    origin: str


Reader = Callable[[Path, str, Definition], Iterator[RawRow]]
"""The rows of a file, given its path, its name for messages, and the dataset definition."""


@contextlib.contextmanager
def _naming(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within the block, errors of reading a file name it."""
    try:
        yield
    except RecordsError:
        raise
    except kinds as error:
        raise RecordsError(
            f"{name} cannot be read ({first_line(error)}); is it complete? Download or copy it again"
        ) from None


def parquet_rows(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    columns = definition.columns
    with _naming(name, Exception), open_parquet(path) as file:  # pyarrow's errors have no common base
        schema, found = file.schema_arrow, image_columns(file.schema_arrow)
        image = next((found[column] for column in columns.names("image") if column in found), None)
        kept = {image.name if image else "", *(one for some in columns.metadata.values() for one in some)}
        unread = dict.fromkeys(one for one in byte_columns(schema) if one not in kept)
        names = [one for one in schema.names if one not in unread]
        for number, row in enumerate(read_rows(file, names, image=image)):
            values = unread | row.values | ({image.name: row.image_path} if image else {})
            yield RawRow(values, row.image, f"{name}/{number}")


def tar_rows(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    """The rows of WebDataset samples: an image, and a JSON file that holds its questions."""
    with _naming(name, *DAMAGED):
        for sample in read_samples(path, name):
            yield from _sample_rows(sample, f"{name}/{one_line(sample['__key__'])}", definition)


def _sample_rows(sample: dict[str, Any], origin: str, definition: Definition) -> Iterator[RawRow]:
    image = next((sample[suffix] for suffix in sample if suffix.lower() in SUFFIXES), None)
    if "json" not in sample:
        raise RecordsError(
            f"{origin}: expected a .json member with its questions, got {sorted(set(sample) - {'__key__', '__url__'})}"
        )
    try:
        value = decode_json(sample["json"].decode(), f"{origin}.json")
    except UnicodeDecodeError as error:
        raise not_utf8(f"{origin}.json", error, "JSON") from None
    own_id = {definition.columns.names("image_id")[0]: sample["__key__"].rpartition("/")[2]}
    for values in _questions_in(value, definition.columns.names("question"), f"{origin}.json"):
        yield RawRow(own_id | values, image, f"{origin}.json")


def _questions_in(value: Any, question: Sequence[str], origin: str) -> list[dict[str, Any]]:
    """One question, a list of them, or an object with such a list and the values that all of them share."""
    if isinstance(value, dict) and not set(question) & set(value):
        lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
        if len(lists) == 1:
            common = {key: item for key, item in value.items() if key != lists[0]}
            return [common | item for item in value[lists[0]]]
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(row, dict) for row in rows):
        raise RecordsError(f"{origin}: expected an object with `{question[0]}`, or a list of such objects")
    return rows


def csv_rows(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    """The rows of a CSV file with a header; JSON under such a name is read as JSON."""
    with _naming(name, OSError, ValueError):
        if is_json(read_head(path)):
            yield from json_rows(path, name, definition)
        else:
            yield from (RawRow(values, None, origin) for origin, values in read_csv(path, name))


def json_rows(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    """The rows of JSONL, or of one JSON array of objects."""
    with _naming(name, OSError, ValueError):
        read = read_array if is_array(read_head(path)) else read_jsonl
        for origin, value in read(path, name):
            if not isinstance(value, dict):
                raise RecordsError(f"{origin}: expected a JSON object, got {type(value).__name__}")
            yield RawRow(value, None, origin)


def text_rows(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    """The rows of a file of `question|answer` lines about one image, which the path names."""
    section = definition.text
    assert section is not None
    fields = field_values(section, name)
    with _naming(name, OSError, ValueError), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin, texts = f"{name}:{number}", line.rstrip("\r\n").split(section.separator)
            if len(texts) != 2:
                raise RecordsError(f"{origin}: expected question{section.separator}answer, got {line.strip()!r}")
            yield RawRow(fields | {"question": texts[0], "answer": texts[1]}, None, origin)


def field_values(section: TextSection, name: str) -> dict[str, str]:
    """The values in a file's path, and the image and image name made of them; empty if the path does not match."""
    pieces = re.split(r"\{(\w+)\}", section.files)
    expression = "".join(
        re.escape(piece).replace(r"\*", "[^/]*") if number % 2 == 0 else f"(?P<{piece}>[^/]+?)"
        for number, piece in enumerate(pieces)
    )
    found = re.fullmatch(f"(?:.*/)?{expression}", name)
    if found is None:
        return {}
    fields = found.groupdict()
    tail = "/".join(name.split("/")[-len(section.files.split("/")) :])
    image = name.removesuffix(tail) + section.image.format(**fields)
    return fields | {"image": image, "image_id": section.image_id.format(**fields)}


FORMAT_SUFFIXES = {"parquet": (".parquet",), "tar": (".tar",), "csv": (".csv", ".tsv"), "json": (".jsonl", ".json")}
"""File formats in order of preference, after text files if the definition has some."""
READERS: dict[str, Reader] = {
    "text": text_rows,
    "parquet": parquet_rows,
    "tar": tar_rows,
    "csv": csv_rows,
    "json": json_rows,
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

    def rows(self, definition: Definition) -> Iterator[tuple[str, RawRow]]:
        """The rows of all files in order, each with the part of the split that its file's name says."""
        for name in self.files:
            part, path = _part_of_file(name), self.root / name
            if self.format in ("parquet", "csv", "json") and path.stat().st_size:
                kind_of_file(path)
            for row in READERS[self.format](path, name, definition):
                yield part, row


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
    names = found[chosen]
    matching = [name for name in names if any(Path(name).match(pattern) for pattern in definition.files)]
    files = matching or names  # local copies may have another layout than the definition says
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
    return next((format for format, suffixes in FORMAT_SUFFIXES.items() if suffix in suffixes), "")


def _by_numbers(name: str) -> list[tuple[int, str]]:
    """A sort key that puts `seq_2` before `seq_10`."""
    return [(int(piece), "") if piece.isdigit() else (0, piece) for piece in re.split(r"(\d+)", name)]


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
