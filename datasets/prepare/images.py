"""Image files of a prepared dataset: each image once, byte for byte.

Design: images with the same bytes are one image. Its file has the name that the dataset has for it, so that people find
it; if that is taken, the first digits of the key are added. Files are written and flushed on threads while the next
rows are read, since flushing one takes milliseconds; a chunk of rows is finished when all of its files are on the disk.
Nothing is decoded, so broken images are written too: `lookonce data audit` and the cache name them.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from lookonce.datasets.image_suffixes import suffix_of_bytes, without_suffix
from lookonce.datasets.images import bytes_key
from lookonce.files import TEMPORARY_MARK, flush, naming_full_disk, temporary_name
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
