"""Image files and their keys: the sha256 of the file's bytes, full width.

Design: content, not path. Two files with the same bytes are one image and are encoded once; an edited file is another
image whatever its name, so its old features can not be taken for new ones. The cost is reading every image file once
a run, about a second a gigabyte from a local disk. Names, sizes and modification times are never trusted, and a key
is never cut short: truncated keys have shown models the wrong image (https://github.com/LMCache/LMCache/issues/4086).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from lookonce.datasets.records import Record
from lookonce.errors import ImageError

NUM_THREADS = 8
"""Hashing releases the GIL; on network storage the threads hide latency."""
NUM_NAMED = 5
"""How many missing images a message names."""


@dataclass(frozen=True)
class ImageIndex:
    """The images of some records: each file's key, and one file for each key."""

    key_of: dict[Path, str]
    path_of: dict[str, Path]

    @property
    def num_files(self) -> int:
        return len(self.key_of)

    @property
    def num_distinct(self) -> int:
        return len(self.path_of)


def image_key(path: Path) -> str:
    """The sha256 of the file's bytes, 64 hexadecimal digits.

    Raises:
        ImageError: it can not be read.
    """
    return bytes_key(read_bytes(path))


def bytes_key(data: bytes) -> str:
    """The key of an image file with these bytes."""
    return hashlib.sha256(data).hexdigest()


def read_bytes(path: Path) -> bytes:
    """The bytes of an image file.

    Raises:
        ImageError: it can not be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"can not read image {path}: {error.strerror}") from None


def index_images(records: Iterable[Record]) -> ImageIndex:
    """Find the key of every image that the records name.

    Raises:
        ImageError: an image is missing or can not be read; all are checked first, and the first few are named with
            the record that asks for them.
    """
    origin_of: dict[Path, str] = {}
    for record in records:
        for path in record.images:
            origin_of.setdefault(path, record.origin)
    _check_present(origin_of)
    paths = sorted(origin_of)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        keys = list(
            tqdm(threads.map(image_key, paths), "hash images", len(paths), unit="image", leave=False, disable=None)
        )
    key_of = dict(zip(paths, keys, strict=True))
    return ImageIndex(key_of, {key: path for path, key in reversed(key_of.items())})


def _check_present(origin_of: dict[Path, str]) -> None:
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        present = list(threads.map(_is_there, origin_of))
    missing = [path for path, found in zip(origin_of, present, strict=True) if not found]
    if missing:
        named = "\n".join(f"  {path} ({origin_of[path]})" for path in missing[:NUM_NAMED])
        more = f"\n  and {len(missing) - NUM_NAMED} more" if len(missing) > NUM_NAMED else ""
        raise ImageError(
            f"{len(missing)} of {len(origin_of)} images are not there, or may not be read:\n{named}{more}\n"
            "Check `data.image_root` in the run file; it is what image paths are relative to."
        )


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a folder one may not enter, or an impossible name
        return False
