"""Image references to paths, and paths to references.

A reference is what a record says of an image: a path, a `file://` URL, a `data:` URL, base64, an object with `bytes`
or `path`.

Design: paths are judged by their letters, without asking the disk. A relative one that leads out of the root keeps its
`..`, which no other path has, and is never opened. An absolute one is itself, as many forms have it, unless an image
root was named: then the root is a fence for it too. So records from elsewhere can be confined by naming a root, and a
relative path never reaches what lies beside the records.

Whatever holds its bytes in itself has no path. Reading is told what to do with such bytes; training can do nothing with
them, since it reads an image by its path in both phases, and says which command writes them out. References to the net
are refused: a training must not depend on what a server gives that day.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from lookonce.datasets.formats.checks import kind, text
from lookonce.errors import RecordsError

Keep = Callable[[bytes], Path]
"""Puts the bytes of an embedded image somewhere; gives the place."""
SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
DATA = re.compile(r"data:([^,]*),", re.IGNORECASE)
BASE64 = re.compile(r"\s*(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|SUkqA|TU0AK|Qk)[A-Za-z0-9+/\s]{60,}={0,2}\s*")
"""Bytes of JPEG, PNG, GIF, WebP, TIFF or BMP files; no path of files that have a suffix."""
ELSEWHERE = "move it there or give another image root"
OBJECT_KEYS = ("bytes", "path", "url", "image")


class Finder:
    """Finds the paths of the images of one records file."""

    def __init__(self, file: Path, image_root: Path | None, keep: Keep | None = None) -> None:
        """`image_root` is the fence; without it, relative paths begin at the file's folder. `keep` takes bytes."""
        self.file, self.keep = file, keep
        self._anchor = os.path.abspath(file.parent if image_root is None else image_root)
        self._inside = os.path.join(self._anchor, "")
        self._is_fenced = image_root is not None
        self._known: dict[str, Path] = {}

    def find(self, reference: Any, origin: str) -> Path:
        """The absolute path of an image.

        Raises:
            RecordsError: the reference is of no known kind, to the net, or embeds an image that nobody keeps.
        """
        if isinstance(reference, str) and reference in self._known:
            return self._known[reference]
        if isinstance(reference, Path):  # the archive in which it is embedded
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

    def _find_object(self, reference: dict[str, Any], origin: str) -> Path:
        if isinstance(data := reference.get("bytes"), str):
            return self._keep(_data_of_base64(data, origin), origin)
        given = [reference[key] for key in OBJECT_KEYS if reference.get(key) is not None]
        if not given:
            raise RecordsError(f"{origin}: an image must have `bytes` or `path`, got {kind(reference)}")
        return self.find(given[0], origin)

    def _keep(self, data: bytes, origin: str) -> Path:
        if self.keep is None:
            raise RecordsError(
                f"{origin}: the image is embedded in the record, and only images that have a path can be read again; "
                f"write them out as files with: lookonce data convert {self.file} OUT.jsonl"
            )
        return self.keep(data)

    def _path(self, name: str) -> Path:
        if name.startswith("/"):
            name = f"/{name.lstrip('/')}"
            if not self._is_fenced:
                return Path(os.path.normpath(name))
        path = os.path.normpath(os.path.join(self._anchor, name))
        if path != self._anchor and not path.startswith(self._inside):
            return Path(self._anchor, os.path.relpath(path, self._anchor))
        return Path(path)


def _local(name: str, origin: str) -> str:
    """The path that a name means."""
    if not (match := SCHEME.match(name)):
        return name
    if match[1].lower() != "file":
        raise RecordsError(
            f"{origin}: image {kind(name)} is not on this machine; download it and give its path: a training must not "
            "depend on what a server gives that day"
        )
    host, slash, path = name[match.end() :].partition("/")
    if host not in ("", "localhost"):
        raise RecordsError(f"{origin}: image {kind(name)} names another machine; expected file:///path/to/a.jpg")
    return unquote(slash + path, errors="surrogateescape")


def _data_of_url(name: str, origin: str) -> bytes:
    match = DATA.match(name)
    if match is None:
        raise RecordsError(f"{origin}: image {kind(name)} is no whole data: URL; it has no comma")
    if match[1].lower().endswith(";base64"):
        return _data_of_base64(unquote(name[match.end() :]), origin)
    return unquote_to_bytes(name[match.end() :])


def _data_of_base64(value: str, origin: str) -> bytes:
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordsError(f"{origin}: the embedded image is no base64 ({error}); is it cut short?") from None


class Namer:
    """Names images for a file that is to be written."""

    def __init__(self, file: Path, image_root: Path | None, *, absolute: bool = False) -> None:
        """Names are relative to `image_root`, or to the file's folder; with `absolute`, whole where that can not be."""
        self.root = file.parent if image_root is None else image_root
        self._absolute = absolute and image_root is None
        self._known: dict[Path, str] = {}

    def name(self, image: Path, origin: str = "") -> str:
        """How the image is called.

        Raises:
            RecordsError: it lies outside of the root, and would not be found from there.
        """
        if image not in self._known:
            self._known[image] = self._name(image, f"{origin}: " if origin else "")
        return self._known[image]

    def _name(self, image: Path, of: str) -> str:
        name = os.path.relpath(image, self.root)
        is_outside = name == os.pardir or name.startswith(os.pardir + os.sep)
        if os.pardir in image.parts:
            raise RecordsError(
                f"{of}image {image} lies outside of the root that it was read with, or of {self.root}; {ELSEWHERE}"
            )
        if is_outside and not self._absolute:
            raise RecordsError(f"{of}image {image} lies outside of {self.root}; {ELSEWHERE}")
        name = os.path.abspath(image) if is_outside else name
        return name if _is_plain(name) else f"/.{name}" if is_outside else f"./{name}"


def _is_plain(name: str) -> bool:
    """Whether it is read as a path, and not as something else that begins like it."""
    return bool(name.strip()) and not (SCHEME.match(name) or name[:5].lower() == "data:" or BASE64.fullmatch(name))
