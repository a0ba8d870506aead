"""Image references: what a record says of an image, as a path.

A reference is a path, a `file://` URL, a `data:` URL, base64, or an object with `bytes` or `path`.

Design: paths are judged by their text, without accessing the disk. A relative path that leads out of the root keeps its
`..`, which no other path has, and is never opened. An absolute path is taken as it is, as many formats use them, unless
an image root was named: then absolute paths, too, must lie inside it. So naming a root confines records from elsewhere,
and a relative path never reaches files outside the folder of the records.

Embedded bytes have no path. The caller may pass a function that stores them; training passes none, since it reads
images by path in both phases, and the error names the command that extracts them. URLs to other machines are refused: a
training must not depend on what a server returns that day.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from lookonce.datasets.formats.checks import kind, refuse_pixel_limits, text
from lookonce.datasets.image_suffixes import SUFFIXES
from lookonce.errors import RecordsError
from lookonce.text import one_line, shell

Keep = Callable[[bytes], Path]
"""Stores the bytes of an embedded image and returns its path."""
SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
DATA = re.compile(r"data:([^,]*),", re.IGNORECASE)
BASE64 = re.compile(r"\s*(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|SUkqA|TU0AK|Qk)[A-Za-z0-9+/\s]{60,}={0,2}\s*")
"""The encoded bytes of JPEG, PNG, GIF, WebP, TIFF or BMP files; a path with a suffix does not match."""
ELSEWHERE = "move it there or give another image root"
ID_FOLDERS, ID_SUFFIXES = ("", "images/"), ("", *(f".{suffix}" for suffix in SUFFIXES))
OBJECT_KEYS = ("bytes", "path", "url", "image")


class ImagePath(PosixPath):
    """The path of an image, which messages show on one line: a name may hold line breaks, as data alone decides it."""

    def __format__(self, spec: str) -> str:
        return format(one_line(str(self)), spec)


class Finder:
    """Finds the paths of the images of one records file."""

    def __init__(self, file: Path, image_root: Path | None, keep: Keep | None = None) -> None:
        """`image_root` confines all paths; by default relative ones begin at the file's folder. `keep` stores bytes."""
        self.file, self.keep = file, keep
        self._anchor = os.path.abspath(file.parent if image_root is None else image_root)
        self._inside = os.path.join(self._anchor, "")
        self._is_fenced = image_root is not None
        self._known: dict[str, Path] = {}

    def find(self, reference: Any, origin: str) -> Path:
        """The absolute path of an image.

        Raises:
            RecordsError: the reference is malformed, is a URL to another machine, or embeds an image without `keep`.
        """
        if isinstance(reference, str) and reference in self._known:
            return self._known[reference]
        if isinstance(reference, Path):  # a row of the parquet file in which it is embedded
            return reference
        if isinstance(reference, dict):
            return self._find_object(reference, origin)
        if isinstance(reference, bytes):
            return self._keep(reference, origin)
        name = text(reference, "image", origin)
        if name[:5].lower() == "data:":
            return self._keep(_data_of_url(name, origin), origin)
        if BASE64.fullmatch(name):
            return self._keep(_data_of_base64(name, origin), origin)
        found = self._known[name] = self._path(_local(name, origin))
        return found

    def find_id(self, name: str) -> Path | None:
        """The file that is called like an image's name in the dataset, with any suffix; None if there is none.

        This is the only search on the disk: the root and its folder `images` are looked at.
        """
        if f"id {name}" not in self._known:
            paths = (self._path(f"{folder}{name}{suffix}") for folder in ID_FOLDERS for suffix in ID_SUFFIXES)
            found = next((path for path in paths if os.pardir not in path.parts and os.path.isfile(path)), None)
            if found is None:
                return None
            self._known[f"id {name}"] = found
        return self._known[f"id {name}"]

    def _find_object(self, reference: dict[str, Any], origin: str) -> Path:
        refuse_pixel_limits(reference, f"{origin}: an image has")
        if isinstance(data := reference.get("bytes"), str):
            return self._keep(_data_of_base64(data, origin), origin)
        given = [reference[key] for key in OBJECT_KEYS if reference.get(key) is not None]
        if not given:
            raise RecordsError(f"{origin}: an image must have `bytes` or `path`, got {kind(reference)}")
        return self.find(given[0], origin)

    def _keep(self, data: bytes, origin: str) -> Path:
        if self.keep is None:
            raise RecordsError(
                f"{origin}: the image is embedded in the record, and only images with a path can be read again; "
                f"extract them with: {shell('lookonce', 'data', 'convert', self.file, 'OUT.jsonl')}"
            )
        return self.keep(data)

    def _path(self, name: str) -> Path:
        if name.startswith("/"):
            name = f"/{name.lstrip('/')}"
            if not self._is_fenced:
                return ImagePath(os.path.normpath(name))
        path = os.path.normpath(os.path.join(self._anchor, name))
        if path != self._anchor and not path.startswith(self._inside):
            return ImagePath(self._anchor, os.path.relpath(path, self._anchor))
        return ImagePath(path)


def _local(name: str, origin: str) -> str:
    """The path that a name or `file://` URL means."""
    if not (match := SCHEME.match(name)):
        return name
    if match[1].lower() != "file":
        raise RecordsError(
            f"{origin}: image {kind(name)} is not on this machine; download it and use its path: a training must not "
            "depend on what a server returns that day"
        )
    host, slash, path = name[match.end() :].partition("/")
    if host not in ("", "localhost"):
        raise RecordsError(f"{origin}: image {kind(name)} names another machine; expected file:///path/to/a.jpg")
    return unquote(slash + path, errors="surrogateescape")


def _data_of_url(name: str, origin: str) -> bytes:
    match = DATA.match(name)
    if match is None:
        raise RecordsError(f"{origin}: image {kind(name)} is not a complete data: URL; it has no comma")
    if match[1].lower().endswith(";base64"):
        return _data_of_base64(unquote(name[match.end() :]), origin)
    return unquote_to_bytes(name[match.end() :])


def _data_of_base64(value: str, origin: str) -> bytes:
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordsError(f"{origin}: the embedded image is not base64 ({error}); is it cut off?") from None


class Namer:
    """The references to images in a file that is being written."""

    def __init__(self, file: Path, image_root: Path | None, *, absolute: bool = False) -> None:
        """Names are relative to `image_root` or the file's folder; with `absolute`, others may be absolute."""
        self.root = file.parent if image_root is None else image_root
        self._absolute = absolute and image_root is None
        self._known: dict[Path, str] = {}

    def name(self, image: Path, origin: str = "") -> str:
        """The name of an image.

        Raises:
            RecordsError: it lies outside the root, from where it would not be found.
        """
        if image not in self._known:
            self._known[image] = self._name(image, f"{origin}: " if origin else "")
        return self._known[image]

    def _name(self, image: Path, of: str) -> str:
        name = os.path.relpath(image, self.root)
        is_outside = name == os.pardir or name.startswith(os.pardir + os.sep)
        if os.pardir in image.parts:
            raise RecordsError(
                f"{of}image {image} lies outside the root that it was read with, or outside {self.root}; {ELSEWHERE}"
            )
        if is_outside and not self._absolute:
            raise RecordsError(f"{of}image {image} lies outside {self.root}; {ELSEWHERE}")
        name = os.path.abspath(image) if is_outside else name
        return name if _is_plain(name) else f"/.{name}" if is_outside else f"./{name}"


def _is_plain(name: str) -> bool:
    """Whether it is read back as a path, not as another kind of reference."""
    return bool(name.strip()) and not (SCHEME.match(name) or name[:5].lower() == "data:" or BASE64.fullmatch(name))
