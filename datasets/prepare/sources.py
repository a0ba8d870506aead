"""From the files of a dataset, at a path or downloaded from the Hub, to rows with images.

Files are parquet, CSV, JSON or JSONL: of the first of `FORMATS` that a folder has. A source is identified by the names,
sizes and contents of its files.

Design: one pass. An embedded image is written when its row is read; image files are found by their rows and read once,
after all rows. A row whose image is not found is kept with the reason, so that it is counted. Nothing is decoded:
images are written byte for byte, broken ones too, which `lookonce data audit` and the cache name.

Images with the same bytes are one image. Its file has the dataset's name for it; if that is taken, the first digits of
the key are added.

An image that is not embedded is a file, or a path into a tar or parquet file. Each pattern of the definition is tried
in the image root if there is one, in the folder of the row's file, and in the source's folder. A name that leads out of
the folder is ignored: a file of questions must not decide what is opened.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lookonce.datasets.archives import find_archive
from lookonce.datasets.formats.image_references import suffix_of_bytes, without_suffix
from lookonce.datasets.formats.record import check_values
from lookonce.datasets.formats.record import shown as value_shown
from lookonce.datasets.images import bytes_key, read_many
from lookonce.datasets.parquet import byte_columns, image_columns, open_parquet, read_rows, without_nulls
from lookonce.datasets.prepare.definition import FIELD, Definition, HubSection
from lookonce.datasets.prepare.rows import Row, part_of, text_of
from lookonce.datasets.text_files import Rows, kind_of_file, read_array, read_cells, read_jsonl
from lookonce.errors import ImageError, RecordsError, SourceError, UsageError
from lookonce.files import NUM_THREADS, files_below, flush, naming_full_disk
from lookonce.hub import download_dataset
from lookonce.text import first_line, nfc, value_of

NUM_RECENT = 4
"""How many images the next one is compared with before its key is computed."""
MAX_STEM = 200
"""Bytes of a file's name without its suffix and the digits of a key; filesystems allow 255."""
URLS = ("http://", "https://")
FORMATS = {"parquet": (".parquet",), "csv": (".csv", ".tsv"), "json": (".jsonl", ".json")}
"""File formats in order of preference, with their suffixes."""
NOT_ROWS = ("report.json", "dataset_infos.json", "dataset_info.json")
"""JSON files that may lie beside the rows and hold none."""


# Files.


@dataclass(frozen=True)
class RawRow:
    values: dict[str, Any]
    image: bytes | None
    origin: str
    folder: Path
    """The folder of its file."""


def parquet_rows(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    columns = definition.columns
    if path.stat().st_size:
        kind_of_file(path)  # its error says what another file is
    with open_parquet(path) as file:
        schema, image_columns_of = file.schema_arrow, image_columns(file.schema_arrow)
        image = next((image_columns_of[column] for column in columns.image if column in image_columns_of), None)
        kept = {image.name if image else "", *(column for names_of in columns.metadata.values() for column in names_of)}
        unread = dict.fromkeys(column for column in byte_columns(schema) if column not in kept)
        names = [column for column in schema.names if column not in unread]
        for number, row in enumerate(read_rows(file, names, image=image)):
            values = unread | {column: without_nulls(value) for column, value in row.values.items()}
            values |= {image.name: row.image_path} if image else {}
            yield RawRow(values, row.image, f"{name}/{number}", path.parent)


def plain_rows(path: Path, name: str) -> Iterator[RawRow]:
    """The rows of CSV with a header, of JSONL, or of one JSON array of objects, as the first bytes say."""
    if not path.stat().st_size:
        return
    kind = kind_of_file(path)
    read: Callable[..., Rows] = read_array if kind == "array" else read_cells if kind == "table" else read_jsonl
    for origin, value in read(path, name):
        if not isinstance(value, dict):
            raise RecordsError(f"{origin}: expected a JSON object, got {type(value).__name__}")
        yield RawRow(value, None, origin, path.parent)


@dataclass(frozen=True)
class Source:
    location: str
    """A path, or the dataset's name on the Hub."""
    format: str
    root: Path
    """The folder that the names of files are relative to."""
    files: dict[str, int]
    """The names of the files in their order, and their sizes in bytes."""
    image_roots: tuple[Path, ...]
    """The folders that are searched for images that are not embedded."""
    revision: str | None = None
    licence: str | None = None
    ignored: tuple[str, ...] = ()
    """Files of other formats."""

    def rows(self, definition: Definition) -> Iterator[tuple[str, RawRow]]:
        """The rows of all files in order, each with the part of the split that its file's name says."""
        for name in self.files:
            part = _part_of_file(name)
            path = self.root / name
            raw = parquet_rows(path, name, definition) if self.format == "parquet" else plain_rows(path, name)
            try:
                for row in raw:
                    yield part, row
            except RecordsError:
                raise
            except Exception as error:  # pyarrow's errors have no common base
                raise RecordsError(
                    f"{name} cannot be read ({first_line(error)}); is it complete? Download or copy it again"
                ) from None


def download_source(
    hub: HubSection, definition: Definition, revision: str | None = None, image_root: Path | None = None
) -> Source:
    """The source of a dataset on the Hub, whose files are downloaded; raises SourceError if it is not available."""
    download = download_dataset(hub.id, revision or hub.revision, hub.files)
    source = find_source(download.folder, definition, image_root)
    return replace(source, location=hub.id, revision=download.commit, licence=download.license)


def find_source(
    path: Path, definition: Definition, image_root: Path | None = None, without: Path | None = None
) -> Source:
    """The source at a path; files below the folder `without` do not belong to it.

    Raises:
        SourceError: no file there has rows.
        UsageError: the image root is not a folder.
    """
    if not path.exists():
        raise SourceError(f"nothing exists at {path}; name a folder, a file, or a dataset on the Hub as owner/name")
    if image_root is not None and not image_root.is_dir():
        raise UsageError(f"--image-root {image_root} is not a folder")
    root = path.parent if path.is_file() else path
    names_of: dict[str, list[str]] = {}
    inside = os.path.join(os.path.realpath(without), "") if without else "\0"
    below = (file for file in files_below(path) if not os.path.realpath(file).startswith(inside))
    for file in [path] if path.is_file() else (file for file in below if file.name not in NOT_ROWS):
        if format := next((name for name, suffixes in FORMATS.items() if file.suffix.lower() in suffixes), ""):
            names_of.setdefault(format, []).append(file.relative_to(root).as_posix())
    chosen = next((name for name in FORMATS if name in names_of), None)
    if chosen is None:
        if path.is_file():
            kind_of_file(path)  # its error says what another file is
        advice = f"see {definition.homepage}" if definition.homepage else "name its folder with --source"
        raise SourceError(f"{path} has no parquet, CSV, JSONL or JSON files with questions; {advice}")
    names = sorted(names_of[chosen], key=_by_numbers)
    matching = [name for name in names if any(Path(name).match(pattern) for pattern in definition.files)]
    return Source(
        location=str(path),
        format=chosen,
        root=root,
        # Local copies may have another layout than the definition says.
        files={name: (root / name).stat().st_size for name in matching or names},
        image_roots=tuple(folder for folder in (image_root, root) if folder is not None),
        ignored=tuple(sorted(name for kind, names in names_of.items() if kind != chosen for name in names)),
    )


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


# Images.


class Stored(NamedTuple):
    """An image that has been written: its key and the name of its file, as in `Row`."""

    key: str
    image: str


class ImageStore:
    """Writes images into a new folder, on threads, since waiting for the disk takes milliseconds an image."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.folder, self._threads = folder, threads
        self._writing: deque[Future[None]] = deque()
        self._stored: dict[str, Stored] = {}
        self._taken: set[str] = set()
        self._key_of = lru_cache(maxsize=NUM_RECENT)(bytes_key)
        folder.mkdir(parents=True)

    def add(self, data: bytes, stem: str) -> Stored:
        """Write an image unless it was written before; `stem` is the preferred name of its file."""
        key = self._key_of(data)
        if key not in self._stored:
            name = self._free_name(stem or key, data, key)
            self._stored[key] = Stored(key, name)
            self._taken.add(name.casefold())
            self._writing.append(self._threads.submit(_write, self.folder / name, data))
            if len(self._writing) > 2 * NUM_THREADS:
                self._writing.popleft().result()
        return self._stored[key]

    def finish(self) -> None:
        while self._writing:
            self._writing.popleft().result()
        flush(self.folder)

    def _free_name(self, stem: str, data: bytes, key: str) -> str:
        safe = re.sub(r"[^\w.-]+", "_", without_suffix(stem)).strip("._").encode()[:MAX_STEM].decode(errors="ignore")
        safe = safe or "image"
        match = re.search(r"\.\w{1,5}$", stem)
        suffix = suffix_of_bytes(data) or (match.group().lower() if match else ".img")
        names = (f"{safe}{suffix}", f"{safe}-{key[:12]}{suffix}", f"{key}{suffix}")
        return next(name for name in names if name.casefold() not in self._taken)


def _write(path: Path, data: bytes) -> None:
    with naming_full_disk(path, len(data)):
        path.write_bytes(data)
        flush(path)


class ImageFinder:
    """Finds images below some folders, by patterns with column names in braces."""

    def __init__(self, roots: Sequence[Path], patterns: Sequence[str]) -> None:
        self._roots = [Path(os.path.abspath(root)) for root in roots]
        self._patterns = patterns
        self._found: dict[tuple[Path | str, ...], Path | None] = {}

    def find(self, values: Mapping[str, Any], folder: Path) -> Path | None:
        """The image of a row of a file in `folder`, or None; the path may lead into an archive."""
        names = tuple(name for name in (_fill(pattern, values) for pattern in self._patterns) if name)
        if (folder, *names) not in self._found:
            roots = [*self._roots[:-1], Path(os.path.abspath(folder)), *self._roots[-1:]]
            below = ((root, Path(os.path.normpath(root / name))) for name in names for root in roots)
            paths = (path for root, path in below if path.is_relative_to(root))
            found = next((path for path in paths if os.path.isfile(path) or find_archive(path)), None)
            self._found[folder, *names] = found
        return self._found[folder, *names]


def _fill(pattern: str, values: Mapping[str, Any]) -> str:
    """A pattern with the values of columns filled in; empty if one of them is missing or a URL."""
    texts = {column: text_of(values.get(column)).strip() for column in FIELD.findall(pattern)}
    if any(not text or "\0" in text or text.lower().startswith(URLS) for text in texts.values()):
        return ""
    return FIELD.sub(lambda column: texts[column[1]], pattern).strip()


def extract(source: Source, definition: Definition, images: Path) -> tuple[list[Row], set[str]]:
    """The rows of a source, whose images are written to the new folder `images`, and the columns that they have."""
    finder, rows = ImageFinder(source.image_roots, definition.images), list[Row]()
    columns: set[str] = set()
    rows_of: dict[Path, list[int]] = defaultdict(list)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        store = ImageStore(images, threads)
        bar = tqdm(source.rows(definition), f"read {source.format}", unit="row", leave=False, disable=None)
        for part, raw in bar:
            columns |= raw.values.keys()
            row, named = _row_of(raw, part, definition)
            if raw.image is not None:
                row = replace(row, **store.add(raw.image, _stem(row, named["image"]))._asdict())
            elif path := finder.find(named, raw.folder):
                rows_of[path].append(len(rows))
            else:
                row = replace(row, problem="no image was found")
            rows.append(row)
        for path, data in read_many(rows_of):
            if isinstance(data, ImageError):
                image: dict[str, Any] = {"problem": str(data)}
            else:
                image = store.add(data, _stem(rows[rows_of[path][0]], path.name))._asdict()
            for number in rows_of[path]:
                rows[number] = replace(rows[number], **image)
        store.finish()
    return rows, columns


def _row_of(raw: RawRow, part: str, definition: Definition) -> tuple[Row, dict[str, Any]]:
    """A row without its image, and the values by which that is found; `part` is that of the file's name."""
    columns, values = definition.columns, raw.values
    image = text_of(_first(values, columns.image)).strip()
    image_id = text_of(_first(values, columns.image_id)).strip()
    if not image_id and raw.image is None:
        image_id = without_suffix(image)
    metadata = {name: _first(values, names) for name, names in columns.metadata.items()}
    row = Row(
        question=_text(raw, columns.question, "question"),
        answer=_text(raw, columns.answer, "answer"),
        key="",
        image_id=image_id,
        split=part_of(text_of(_first(values, columns.split))) or part,
        metadata={name: value for name, value in metadata.items() if value is not None and value != ""},
        origin=raw.origin,
    )
    texts = {"question": row.question, "answer": row.answer, "image_id": image_id, "image": image}
    check_values(dict.fromkeys(values) | texts | dict(row.metadata), raw.origin)
    return row, {**values, "image": image, "image_id": image_id}


def _first(values: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these columns that the row has."""
    return next((value_of(values, name) for name in names if _has(values, name)), None)


def _has(values: Mapping[str, Any], name: str) -> bool:
    return name in values or (not name.isascii() and nfc(name) in map(nfc, values))


def _text(raw: RawRow, names: Sequence[str], key: str) -> str:
    """The question or the answer of a row."""
    if not any(_has(raw.values, name) for name in names):
        raise RecordsError(
            f"{raw.origin}: expected a column {' or '.join(f'`{name}`' for name in names)}, got {sorted(raw.values)}; "
            f"name it in the dataset's YAML file: columns: {{{key}: NAME}}"
        )
    value = _first(raw.values, names)
    if isinstance(value, dict | list | bytes):
        raise RecordsError(
            f"{raw.origin}: the {key} must be a text, got {value_shown(value)}; write a row for each of several "
            "answers: rows with the same image and question become one record with all answers as references"
        )
    return text_of(value)


def _stem(row: Row, file_name: str) -> str:
    return (row.image_id or file_name).rpartition("/")[2]
