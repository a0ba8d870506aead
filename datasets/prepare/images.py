"""Image files of a prepared set: each image once, byte for byte as it came.

Design: what is one image is decided by its bytes, and its file is called by the name that the set has for it, so that
people find it. Where two images want one name, the later one has the first digits of its key added. Files are written
and flushed on threads while the next rows are read, since flushing one takes milliseconds; a portion of rows is done
when all of its files are on the disk. Nothing is decoded, so broken images are written too: `lookonce data audit` and
the cache name them.
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

from lookonce.datasets.images import bytes_key
from lookonce.datasets.prepare.splits import ENDING
from lookonce.files import TEMPORARY_MARK, flush, temporary_name
from lookonce.threads import NUM_THREADS

NUM_RECENT = 4
"""Images that the next one is compared with before it is hashed."""
MAX_STEM = 100
"""Characters of a file's name; filesystems allow 255 bytes."""
SIGNATURES = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"),
)


class Stored(NamedTuple):
    """An image that has been written."""

    key: str
    name: str
    size_bytes: int


class ImageStore:
    """Writes images into a folder; a context, at whose end nothing is left to write."""

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
        """Write an image unless it is there, and say what it is called; `stem` is the name that it should have."""
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
        """The images after the first so many, in the order in which they were added."""
        return list(self._stored.values())[number:]

    def finish(self) -> None:
        """Wait until all that was added is on the disk."""
        while self._writing:
            self._writing.popleft().result()
        flush(self.folder)

    def _free_name(self, stem: str, data: bytes, key: str) -> str:
        stem, suffix = _safe(stem), _suffix(stem, data)
        for name in (f"{stem}{suffix}", f"{stem}-{key[:12]}{suffix}", f"{key}{suffix}"):
            if name.casefold() not in self._key_of_name:
                return name
        raise AssertionError("an image's key is a name of its own")

    def _write_soon(self, path: Path, data: bytes) -> None:
        self._writing.append(self._threads.submit(_write, path, data))
        if len(self._writing) > 2 * NUM_THREADS:
            self._writing.popleft().result()


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed process was writing; nobody else may be at work in the folder."""
    for path in folder.glob(f"*{TEMPORARY_MARK}*"):
        path.unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _safe(stem: str) -> str:
    """A name as part of a file's name, without its ending if that is an image's."""
    return re.sub(r"[^\w.-]+", "_", ENDING.sub("", stem)).strip("._")[:MAX_STEM] or "image"


def _suffix(stem: str, data: bytes) -> str:
    """The ending that the bytes ask for, or else that of the name."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    for signature, suffix in SIGNATURES:
        if data.startswith(signature):
            return suffix
    found = re.search(r"\.\w{1,5}$", stem)
    return found.group().lower() if found else ".img"
