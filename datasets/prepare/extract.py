"""From the rows of a source to rows with images, each of which is written once, byte for byte.

Design: one pass. An embedded image is written when its row is read; image files are found by their rows and read once,
after all rows. A row whose image is not found is kept with the reason, so that it is counted like all others. Nothing
is decoded, so broken images are written too: `lookonce data audit` and the cache name them.

Images with the same bytes are one image. Its file has the name that the dataset has for it, so that people find it; if
that is taken, the first digits of the key are added.

An image that is not embedded is a file, a member of a zip file, or a path into a tar or parquet file. Each pattern of
the dataset definition is tried in the image root if there is one, in the source's folder, and in the zip files there,
until a file is found. Zip files are read in place (SLAKE has its images in one). A name that leads out of the folder is
ignored, since a file of questions should not decide what is opened.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from lookonce.datasets.archives import find_archive, unreadable
from lookonce.datasets.formats.image_references import suffix_of_bytes, without_suffix
from lookonce.datasets.formats.record import check_values
from lookonce.datasets.images import bytes_key, read_many
from lookonce.datasets.parquet import MAX_IMAGE_BYTES
from lookonce.datasets.prepare.definition import Definition
from lookonce.datasets.prepare.rows import Row, part_of, text_of
from lookonce.datasets.prepare.sources import RawRow, Source
from lookonce.errors import ImageError, RecordsError
from lookonce.files import flush, naming_full_disk
from lookonce.text import nfc, value_of
from lookonce.threads import threaded_map

NUM_RECENT = 4
"""How many images the next one is compared with before it is hashed."""
MAX_STEM = 100
"""Characters of a file's name; filesystems allow 255 bytes."""
URLS = ("http://", "https://")


class Stored(NamedTuple):
    """An image that has been written."""

    key: str
    name: str


class ImageStore:
    """Writes images into a new folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
            _write(self.folder / image.name, data)
        self._recent.appendleft((data, image))
        return image

    def finish(self) -> None:
        """Wait until all images are on the disk."""
        for _ in threaded_map(flush, (*self.folder.iterdir(), self.folder)):
            pass

    def _free_name(self, stem: str, data: bytes, key: str) -> str:
        safe = re.sub(r"[^\w.-]+", "_", without_suffix(stem)).strip("._")[:MAX_STEM] or "image"
        found = re.search(r"\.\w{1,5}$", stem)
        suffix = suffix_of_bytes(data) or (found.group().lower() if found else ".img")
        names = (f"{safe}{suffix}", f"{safe}-{key[:12]}{suffix}", f"{key}{suffix}")
        return next(name for name in names if name.casefold() not in self._taken)


def _write(path: Path, data: bytes) -> None:
    with naming_full_disk(path, len(data)):
        path.write_bytes(data)


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
    store, finder = ImageStore(images), ImageFinder(source.image_roots, definition.image_patterns)
    rows: list[Row] = []
    columns: set[str] = set()
    path_of: dict[int, Path] = {}
    first: dict[Path, Row] = {}
    with tqdm(desc=f"read {source.format}", unit="row", leave=False, disable=None) as progress:
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
        rows[number] = replace(row, problem=str(image)) if isinstance(image, ImageError) else _with_image(row, image)
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
