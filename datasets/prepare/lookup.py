"""Finding the image of a row that is not embedded: a file, a member of a zip file, or a path into a tar or parquet
file.

Design: a dataset definition has patterns. Each is tried in the image root if there is one, in the source's folder, and
in the zip files there, until a file is found. Zip files are read in place (SLAKE has its images in one). A name that
leads out of the folder is ignored, since a file of questions should not decide what is opened.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lookonce.datasets.archives import find_archive, unreadable
from lookonce.datasets.images import read_many
from lookonce.datasets.prepare.rows import text_of
from lookonce.datasets.readers.image_column import MAX_IMAGE_BYTES
from lookonce.errors import ImageError

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
    except (
        OSError,
        zipfile.BadZipFile,
        RuntimeError,
        NotImplementedError,
    ) as error:  # encrypted, or an unknown compression
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
