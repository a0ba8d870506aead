"""From a source to a folder of images and a journal of rows, chunk by chunk, from which an interrupted run resumes.

    DIR/images/                         each image once, byte for byte
    DIR/.prepare/claim.json             the process that prepares the folder
    DIR/.prepare/settings.json          the dataset definition, the source and the options
    DIR/.prepare/portion-00012.json     the rows of a chunk, and the images that came with them

Design: one pass. An embedded image is written when its row is read; an image file is found by its row and read once. A
row whose image is not found is kept with the reason, so that it is counted like all others.

Images with the same bytes are one image. Its file has the name that the dataset has for it, so that people find it; if
that is taken, the first digits of the key are added. Files are written and flushed on threads while the next rows are
read, since flushing one takes milliseconds; a chunk is finished when all of its files are on the disk. Nothing is
decoded, so broken images are written too: `lookonce data audit` and the cache name them.

An image that is not embedded is a file, a member of a zip file, or a path into a tar or parquet file. Each pattern of
the dataset definition is tried in the image root if there is one, in the source's folder, and in the zip files there,
until a file is found. Zip files are read in place (SLAKE has its images in one). A name that leads out of the folder is
ignored, since a file of questions should not decide what is opened.

A chunk's file in the journal is written when all of its images are on the disk, so that it is true after a power cut. A
chunk counts as finished only if its image files still exist with the right size. The names of images depend on those
before them, so chunks are finished in order, and a run resumes at the first that is missing. The journal is removed
when the records are written; `report.json` then says what was prepared.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tqdm import tqdm

from lookonce.claim_file import FolderClaim
from lookonce.datasets.archives import find_archive, unreadable
from lookonce.datasets.formats.image_references import suffix_of_bytes, without_suffix
from lookonce.datasets.formats.record import check_values
from lookonce.datasets.images import bytes_key, read_many
from lookonce.datasets.parquet import MAX_IMAGE_BYTES
from lookonce.datasets.prepare.definition import Definition
from lookonce.datasets.prepare.rows import Row, part_of, text_of
from lookonce.datasets.prepare.sources import Chunk, RawRow, Source
from lookonce.differences import Difference, differences
from lookonce.errors import ImageError, RecordsError, UsageError
from lookonce.files import TEMPORARY_MARK, flush, naming_full_disk, read_object, temporary_name, write_json, write_text
from lookonce.text import count, nfc, value_of
from lookonce.threads import NUM_THREADS

NUM_RECENT = 4
"""How many images the next one is compared with before it is hashed."""
MAX_STEM = 100
"""Characters of a file's name; filesystems allow 255 bytes."""


class Stored(NamedTuple):
    """An image that has been written."""

    key: str
    name: str
    size_bytes: int


class ImageStore:
    """Writes images into a folder. As a context manager it ends when all of them are written."""

    def __init__(self, folder: Path, known: Iterable[Stored] = ()) -> None:
        self.folder = folder
        self._stored = {image.key: image for image in known}
        self._key_of_name = {image.name.casefold(): image.key for image in self._stored.values()}
        self._recent: deque[tuple[bytes, Stored]] = deque(maxlen=NUM_RECENT)
        self._writing: deque[Future[None]] = deque()
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> ImageStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=kind is not None)

    def add(self, data: bytes, stem: str) -> Stored:
        """Write an image unless it was written before; `stem` is the preferred name of its file."""
        for known, stored in self._recent:
            if known is data or known == data:
                return stored
        key = bytes_key(data)
        image = self._stored.get(key)
        if image is None:
            image = Stored(key, self._free_name(stem or key, data, key), len(data))
            self._stored[key] = image
            self._key_of_name[image.name.casefold()] = key
            self._write_soon(self.folder / image.name, data)
        self._recent.appendleft((data, image))
        return image

    @property
    def num_images(self) -> int:
        return len(self._stored)

    def since(self, number: int) -> list[Stored]:
        """The images after the first `number`, in the order in which they were added."""
        return list(self._stored.values())[number:]

    def finish(self) -> None:
        """Wait until all added images are on the disk."""
        while self._writing:
            self._writing.popleft().result()
        flush(self.folder)

    def _free_name(self, stem: str, data: bytes, key: str) -> str:
        stem, suffix = _safe(stem), _suffix(stem, data)
        for name in (f"{stem}{suffix}", f"{stem}-{key[:12]}{suffix}", f"{key}{suffix}"):
            if name.casefold() not in self._key_of_name:
                return name
        raise AssertionError("the key of an image is a unique name")

    def _write_soon(self, path: Path, data: bytes) -> None:
        self._writing.append(self._threads.submit(_write, path, data))
        if len(self._writing) > 2 * NUM_THREADS:
            self._writing.popleft().result()


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary files of a killed process; no other process may be writing to the folder."""
    for path in folder.glob(f"*{TEMPORARY_MARK}*"):
        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    temporary = temporary_name(path)
    try:
        with naming_full_disk(path, len(data)):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _safe(stem: str) -> str:
    """A name as the stem of a file name."""
    return re.sub(r"[^\w.-]+", "_", without_suffix(stem)).strip("._")[:MAX_STEM] or "image"


def _suffix(stem: str, data: bytes) -> str:
    """The suffix that the bytes ask for, or else that of the name."""
    found = re.search(r"\.\w{1,5}$", stem)
    return suffix_of_bytes(data) or (found.group().lower() if found else ".img")


URLS = ("http://", "https://")


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
        for archive, members in self._zips.items():
            if name in members:
                return archive / name
        return None

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
        plain: list[Path] = []
        members: dict[Path, list[Path]] = {}
        for path in dict.fromkeys(paths):
            archive = next((parent for parent in path.parents if parent in self._zips), None) if self._zips else None
            if archive is None:
                plain.append(path)
            else:
                members.setdefault(archive, []).append(path)
        yield from read_many(plain)
        for archive, inside in members.items():
            with zipfile.ZipFile(archive) as file:
                for path in inside:
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
        for value in self._finished():
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
        for value in self._finished():
            rows += [Row(**dict(zip(FIELDS, values, strict=True))) for values in value["rows"]]
            columns |= set(value["columns"])
        return rows, sorted(columns)

    def clear(self) -> None:
        """Remove the journal of a complete dataset."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _is_there(self, image: Stored) -> bool:
        try:
            return (self.images / image.name).stat().st_size == image.size_bytes
        except OSError:
            return False

    def _finished(self) -> Iterator[dict[str, Any]]:
        """The files of finished chunks, up to the first that is missing."""
        for number in itertools.count():
            if not (path := self._chunk_file(number)).exists():
                return
            yield json.loads(path.read_text(encoding="utf-8"))

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


def extract(source: Source, definition: Definition, num_variants: int, journal: Journal) -> None:
    """Read all chunks that the journal lacks."""
    num_done, images, files = journal.done()
    finder = ImageFinder(source.image_roots, definition.image_patterns)
    with ImageStore(journal.images, images) as store:
        extraction = Extraction(definition, finder, store, num_variants, files)
        for number, (part, chunk) in enumerate(_with_progress(source, definition)):
            if number >= num_done:
                known, before = store.num_images, set(files)
                rows = extraction.read(chunk, part)
                store.finish()
                new_files = {name: files[name] for name in files.keys() - before}
                journal.write(number, rows, store.since(known), dict(sorted(new_files.items())), extraction.columns)


def _with_progress(source: Source, definition: Definition) -> Iterator[tuple[str, Chunk]]:
    """The chunks of a source, with a progress bar of rows; only parquet files know their total in advance."""
    chunks: Iterable[tuple[str, Chunk]] = source.chunks(definition)
    total = None
    if source.format == "parquet":
        chunks = list(chunks)
        total = sum(chunk.num_rows or 0 for _, chunk in chunks)
    with tqdm(desc=f"read {source.format}", total=total, unit="row", leave=False, disable=None) as progress:
        for part, chunk in chunks:
            yield part, chunk
            progress.update(chunk.num_rows or 0)


@dataclass
class _Draft:
    """A row whose image may still have to be read."""

    row: Row
    path: Path | None = None


@dataclass
class Extraction:
    """Turns the rows of files into rows with images."""

    definition: Definition
    finder: ImageFinder
    store: ImageStore
    num_variants: int
    files: dict[str, Stored]
    """The image of each file of the source that was read."""
    unreadable: dict[str, str] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    """The columns of all rows so far."""

    def read(self, chunk: Chunk, part: str) -> list[Row]:
        """The rows of a chunk; their images are written or in the queue."""
        drafts = list(itertools.chain.from_iterable(self._drafts(raw, part) for raw in chunk.read()))
        self._store_files(drafts)
        return [self._finish(draft) for draft in drafts]

    def _drafts(self, raw: RawRow, part: str) -> Iterator[_Draft]:
        """The row itself, and one for each augmented variant of its image that is found."""
        columns, values = self.definition.columns, raw.values
        self.columns |= values.keys()
        image = text_of(_first(values, columns.names("image"))).strip()
        image_id = text_of(_first(values, columns.names("image_id"))).strip()
        if not image_id and raw.image is None:
            image_id = without_suffix(image)
        named = {**values, "image": image, "image_id": image_id}
        row = Row(
            question=text_of(_wanted(raw, columns.names("question"), "question")),
            answer=text_of(_wanted(raw, columns.names("answer"), "answer")),
            key="",
            image_id=image_id,
            split=part_of(text_of(_first(values, columns.split))) or part,
            metadata=self._metadata(values),
            origin=raw.origin,
        )
        texts = {"question": row.question, "answer": row.answer, "image_id": image_id, "image": image}
        check_values(dict.fromkeys(values) | texts | dict(row.metadata), raw.origin)
        if raw.image is not None:
            yield _Draft(_with_image(row, self.store.add(raw.image, _stem(row, image))))
        else:
            yield self._look_up(row, named, None)
        for number in range(1, self.num_variants + 1):
            variant = replace(row, variant=str(number))
            draft = self._look_up(variant, named | {"variant": number}, self.definition.variants)
            if draft.path:
                yield draft

    def _look_up(self, row: Row, named: Mapping[str, Any], patterns: list[str] | None) -> _Draft:
        path = self.finder.find(named, patterns)
        return _Draft(row, path) if path else _Draft(replace(row, problem="no image was found"))

    def _metadata(self, values: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {name: _first(values, names) for name, names in self.definition.columns.metadata.items()}
        return {name: value for name, value in chosen.items() if value is not None and value != ""}

    def _store_files(self, drafts: Iterable[_Draft]) -> None:
        first: dict[Path, Row] = {}
        for draft in drafts:
            if draft.path and str(draft.path) not in self.files:
                first.setdefault(draft.path, draft.row)
        for path, data in self.finder.read(first):
            if isinstance(data, ImageError):
                self.unreadable[str(path)] = str(data)
            else:
                self.files[str(path)] = self.store.add(data, _stem(first[path], path.name))

    def _finish(self, draft: _Draft) -> Row:
        if draft.path is None:
            return draft.row
        stored = self.files.get(str(draft.path))
        if stored is None:
            return replace(draft.row, problem=self.unreadable[str(draft.path)])
        return _with_image(draft.row, stored)


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
