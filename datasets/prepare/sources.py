"""From the files of a dataset, at a path or downloaded from the Hub, to rows with images.

Files are parquet, WebDataset tars, CSV, JSON, JSONL, or question|answer lines. The file format is the first of
`FORMATS` that a folder has, so users need not name it; `--format` chooses if a folder has several. A source is
identified by the names and sizes of its files. Values are strict, as records are: an error names file and line.

Design: one pass. An embedded image is written when its row is read; image files are found by their rows and read once,
after all rows. A row whose image is not found is kept with the reason, so that it is counted like all others. Nothing
is decoded: images are written byte for byte, broken ones too, which `lookonce data audit` and the cache name.

Images with the same bytes are one image. Its file has the name that the dataset has for it, so that people find it; if
that is taken, the first digits of the key are added.

An image that is not embedded is a file, a member of a zip file, or a path into a tar or parquet file. Each pattern of
the dataset definition is tried in the image root if there is one, in the source's folder, and in the zip files there,
until a file is found. Zip files are read in place (SLAKE has its images in one). A name that leads out of the folder is
ignored, since a file of questions should not decide what is opened.
"""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lookonce.datasets.archives import DAMAGED, find_archive, has_json, read_samples, unreadable
from lookonce.datasets.formats.image_references import SUFFIXES, suffix_of_bytes, without_suffix
from lookonce.datasets.formats.record import check_values
from lookonce.datasets.images import bytes_key, read_many
from lookonce.datasets.parquet import MAX_IMAGE_BYTES, byte_columns, image_columns, open_parquet, read_rows
from lookonce.datasets.prepare.definition import Definition, HubSection, TextSection
from lookonce.datasets.prepare.rows import Row, part_of, text_of
from lookonce.datasets.text_files import Rows, decode_json, kind_of_file, not_utf8, read_array, read_csv, read_jsonl
from lookonce.errors import ImageError, RecordsError, SourceError, UsageError
from lookonce.files import files_below, flush, naming_full_disk
from lookonce.hub import download_dataset
from lookonce.text import first_line, nfc, one_line, value_of
from lookonce.threads import NUM_THREADS

NUM_RECENT = 4
"""How many images the next one is compared with before it is hashed."""
MAX_STEM = 100
"""Characters of a file's name; filesystems allow 255 bytes."""
URLS = ("http://", "https://")
FORMAT_SUFFIXES = {"parquet": (".parquet",), "tar": (".tar",), "csv": (".csv", ".tsv"), "json": (".jsonl", ".json")}
FORMATS = ("text", *FORMAT_SUFFIXES)
"""File formats in order of preference; text files are those that the definition names."""
NOT_ROWS = ("report.json", "dataset_infos.json", "dataset_info.json")
"""JSON files that may lie beside the rows and hold none."""


# Files.


@dataclass(frozen=True)
class RawRow:
    """One row as the file has it."""

    values: dict[str, Any]
    image: bytes | None
    """The embedded image."""
    origin: str


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
    if path.stat().st_size:
        kind_of_file(path)  # its error says what another file is
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


def plain_rows(path: Path, name: str, definition: Definition) -> Iterator[RawRow]:
    """The rows of CSV with a header, of JSONL, or of one JSON array of objects, as the first bytes say."""
    with _naming(name, OSError, ValueError):
        if not path.stat().st_size:
            return
        kind = kind_of_file(path)
        read: Callable[..., Rows] = read_array if kind == "array" else read_csv if kind == "table" else read_jsonl
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


READERS: dict[str, Callable[[Path, str, Definition], Iterator[RawRow]]] = {
    "text": text_rows,
    "parquet": parquet_rows,
    "tar": tar_rows,
}
"""The rows of a file of a format, given its path, its name for messages, and the dataset definition."""


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
            part = _part_of_file(name)
            for row in READERS.get(self.format, plain_rows)(self.root / name, name, definition):
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


# Images.


class Stored(NamedTuple):
    """An image that has been written."""

    key: str
    name: str


class ImageStore:
    """Writes images into a new folder, on threads, since waiting for the disk takes milliseconds an image."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        self.folder, self._threads = folder, threads
        self._writing: deque[Future[None]] = deque()
        self._stored: dict[str, Stored] = {}
        self._taken: set[str] = set()
        self._recent: deque[tuple[bytes, Stored]] = deque(maxlen=NUM_RECENT)
        folder.mkdir(parents=True)

    def add(self, data: bytes, stem: str) -> Stored:
        """Write an image unless it was written before; `stem` is the preferred name of its file."""
        for known, stored in self._recent:
            if known is data or known == data:
                return stored
        key = bytes_key(data)
        image = self._stored.get(key)
        if image is None:
            image = self._stored[key] = Stored(key, self._free_name(stem or key, data, key))
            self._taken.add(image.name.casefold())
            self._writing.append(self._threads.submit(_write, self.folder / image.name, data))
            if len(self._writing) > 2 * NUM_THREADS:
                self._writing.popleft().result()
        self._recent.appendleft((data, image))
        return image

    def finish(self) -> None:
        """Wait until all images are on the disk."""
        while self._writing:
            self._writing.popleft().result()
        flush(self.folder)

    def _free_name(self, stem: str, data: bytes, key: str) -> str:
        safe = re.sub(r"[^\w.-]+", "_", without_suffix(stem)).strip("._")[:MAX_STEM] or "image"
        found = re.search(r"\.\w{1,5}$", stem)
        suffix = suffix_of_bytes(data) or (found.group().lower() if found else ".img")
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
        self._found: dict[tuple[str, ...], Path | None] = {}

    def find(self, values: Mapping[str, Any], patterns: Sequence[str] | None = None) -> Path | None:
        """The image of a row, or None; the path may lead into an archive."""
        names = tuple(name for name in (_fill(each, values) for each in patterns or self._patterns) if name)
        if names not in self._found:
            self._found[names] = next((path for path in map(self._look_for, names) if path), None)
        return self._found[names]

    def _look_for(self, name: str) -> Path | None:
        for root in self._roots:
            path = os.path.normpath(os.path.join(root, name))
            if os.path.commonpath((root, path)) != str(root):
                continue
            if os.path.isfile(path) or find_archive(Path(path)):
                return Path(path)
        return next((archive / name for archive, members in self._zips.items() if name in members), None)

    @cached_property
    def _zips(self) -> dict[Path, frozenset[str]]:
        zips = {}
        for path in sorted(path for root in self._roots for path in root.glob("*.zip")):
            try:
                with zipfile.ZipFile(path) as archive:
                    zips[path] = frozenset(archive.namelist())
            except (OSError, zipfile.BadZipFile) as error:
                raise ImageError(f"{path} cannot be read ({error}); download it again") from None
        return zips

    def read(self, paths: Iterable[Path]) -> Iterator[tuple[Path, bytes | ImageError]]:
        """The bytes of images that were found, each once; members of zip files come last."""
        inside: dict[Path | None, list[Path]] = {None: []}
        for path in dict.fromkeys(paths):
            archive = next((parent for parent in path.parents if parent in self._zips), None)
            inside.setdefault(archive, []).append(path)
        yield from read_many(inside.pop(None))
        for archive, members in inside.items():
            assert archive
            with zipfile.ZipFile(archive) as file:
                for path in members:
                    yield path, _member(file, path, path.relative_to(archive).as_posix())


def _member(file: zipfile.ZipFile, path: Path, name: str) -> bytes | ImageError:
    try:
        if (num_bytes := file.getinfo(name).file_size) > MAX_IMAGE_BYTES:  # it is never longer when it is read
            return unreadable(path, f"it has {num_bytes:,} bytes; the limit is {MAX_IMAGE_BYTES:,}")
        return file.read(name)
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:  # such as encrypted, or an unknown compression
        return unreadable(path, str(error))


def _fill(pattern: str, values: Mapping[str, Any]) -> str:
    """A pattern with the values of columns filled in; empty if one of them is missing or a URL."""
    try:
        name = pattern.format_map(_Texts(values))
    except KeyError:
        return ""
    return "" if "\0" in name else name.strip()


class _Texts(dict[str, Any]):
    """Values as text for a path."""

    def __getitem__(self, key: str) -> str:
        text = text_of(self.get(key)).strip()
        if not text or text.lower().startswith(URLS):
            raise KeyError(key)
        return text


def extract(source: Source, definition: Definition, num_variants: int, images: Path) -> tuple[list[Row], set[str]]:
    """The rows of a source, whose images are written to the new folder `images`, and the columns that they have.

    Each row is followed by one for each of the first `num_variants` augmented variants of its image that is found.
    """
    finder, rows = ImageFinder(source.image_roots, definition.image_patterns), list[Row]()
    columns: set[str] = set()
    path_of: dict[int, Path] = {}
    first: dict[Path, Row] = {}
    progress = tqdm(desc=f"read {source.format}", unit="row", leave=False, disable=None)
    with progress, ThreadPoolExecutor(NUM_THREADS) as threads:
        store = ImageStore(images, threads)
        for part, raw in source.rows(definition):
            columns |= raw.values.keys()
            row, named = _row_of(raw, part, definition)
            found = [(row, None if raw.image is not None else finder.find(named))]
            for number in range(1, num_variants + 1):
                if path := finder.find(named | {"variant": number}, definition.variants):
                    found.append((replace(row, variant=str(number)), path))
            for one, path in found:
                if path:
                    path_of[len(rows)] = path
                    first.setdefault(path, one)
                elif raw.image is not None:
                    one = _with_image(one, store.add(raw.image, _stem(one, named["image"])))
                else:
                    one = replace(one, problem="no image was found")
                rows.append(one)
            progress.update()
        found_at = {
            path: data if isinstance(data, ImageError) else store.add(data, _stem(first[path], path.name))
            for path, data in finder.read(first)
        }
        for number, path in path_of.items():
            image, row = found_at[path], rows[number]
            rows[number] = (
                replace(row, problem=str(image)) if isinstance(image, ImageError) else _with_image(row, image)
            )
        store.finish()
    return rows, columns


def _row_of(raw: RawRow, part: str, definition: Definition) -> tuple[Row, dict[str, Any]]:
    """A row without its image, and the values by which that is found; `part` is that of the file's name."""
    columns, values = definition.columns, raw.values
    image = text_of(_first(values, columns.names("image"))).strip()
    image_id = text_of(_first(values, columns.names("image_id"))).strip()
    if not image_id and raw.image is None:
        image_id = without_suffix(image)
    metadata = {name: _first(values, names) for name, names in columns.metadata.items()}
    row = Row(
        question=text_of(_wanted(raw, columns.names("question"), "question")),
        answer=text_of(_wanted(raw, columns.names("answer"), "answer")),
        key="",
        image_id=image_id,
        split=part_of(text_of(_first(values, columns.split))) or part,
        metadata={name: value for name, value in metadata.items() if value is not None and value != ""},
        origin=raw.origin,
    )
    texts = {"question": row.question, "answer": row.answer, "image_id": image_id, "image": image}
    check_values(dict.fromkeys(values) | texts | dict(row.metadata), raw.origin)
    return row, {**values, "image": image, "image_id": image_id}


def _with_image(row: Row, stored: Stored) -> Row:
    return replace(row, key=stored.key, image=stored.name)


def _first(values: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these columns that the row has."""
    return next((value_of(values, name) for name in names if _has(values, name)), None)


def _has(values: Mapping[str, Any], name: str) -> bool:
    return name in values or (not name.isascii() and nfc(name) in map(nfc, values))


def _wanted(raw: RawRow, names: Sequence[str], what: str) -> Any:
    if not any(_has(raw.values, name) for name in names):
        raise RecordsError(
            f"{raw.origin}: expected a column {' or '.join(f'`{name}`' for name in names)}, got {sorted(raw.values)}; "
            f"name it in the dataset's YAML file: columns: {{{what}: NAME}}"
        )
    return _first(raw.values, names)


def _stem(row: Row, file_name: str) -> str:
    """The preferred file name of a row's image."""
    stem = (row.image_id or file_name).rpartition("/")[2]
    return f"{stem}-variant-{row.variant}" if row.variant else stem
