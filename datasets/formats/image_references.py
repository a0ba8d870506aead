"""Image references: what a record says of an image, as a path; and image tags and marks in texts.

A reference is a path, a `file://` URL, a `data:` URL in base64, or an object with `bytes` or `path`. A tag is
`<image>`; marks are those of other programs, such as `<|image_1|>`, `<image_placeholder>` and `[img]`.

Design: paths are judged by their text, without accessing the disk. A relative path that leads out of the root keeps its
`..`, which no other path has, and is never opened. An absolute path is taken as it is, as many formats use them, unless
an image root was named: then it must lie inside the root. So a root confines records from elsewhere.

Embedded bytes have no path. A caller may pass a function that stores them; training passes none, since it reads images
by path in both phases. Stored bytes get the suffix of their first bytes, without Pillow, so broken images keep the one
that they claim. URLs to other machines are refused: a training must not depend on what a server returns that day.

All questions about an image share its tokens, so images come before the first question. A tag at the beginning of that
question means this; a tag at its end is moved there, as LLaVA does. Anywhere else the position has a meaning that would
be lost, and the record is refused. Removing a tag removes one line break beside it, or spaces, so a question that
begins with a line break can be written and read back.

Marks are refused in every format, so no record is trained without the image that its text speaks of. `<image>` is a
tag in formats that define it, and a word in the others.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any
from urllib.parse import unquote

from lookonce.datasets.formats.record import (
    Record,
    is_number,
    kind,
    may_have_marks,
    refuse_pixel_limits,
    shown,
    text,
    texts,
)
from lookonce.errors import RecordsError
from lookonce.text import count, one_line, shell

SUFFIXES = ("jpg", "jpeg", "png", "gif", "bmp", "tif", "tiff", "webp")
SIGNATURES = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG\r\n\x1a\n": ".png",
    b"GIF8": ".gif",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}
"""The first bytes of image files, and their suffix; WebP's are in two places."""
IMAGE_SUFFIX = re.compile(rf"\.({'|'.join(SUFFIXES)})$", re.IGNORECASE)


def suffix_of_bytes(data: bytes) -> str:
    """The suffix that the first bytes of a file ask for; empty if they are unknown."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for signature, suffix in SIGNATURES.items() if data.startswith(signature)), "")


def without_suffix(name: str) -> str:
    """A file name without its suffix, if that is an image's."""
    return IMAGE_SUFFIX.sub("", name)


Keep = Callable[[bytes], Path]
"""Stores the bytes of an embedded image and returns its path."""
SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
DATA = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
MAX_PATH = 4096
"""The longest path; longer texts are embedded images."""
ELSEWHERE = "move it there or give another image root"
ID_FOLDERS = ("", "images/")
ID_SUFFIXES = ("", *(f".{suffix}" for suffix in (*SUFFIXES, *map(str.upper, SUFFIXES))))
OBJECT_KEYS = ("bytes", "path", "url", "image")


class ImagePath(PosixPath):
    """The path of an image, which messages show on one line: a name may hold line breaks, as data alone decides it."""

    def __format__(self, spec: str) -> str:
        return format(one_line(str(self)), spec)


class Finder:
    """What a records file refers to: the paths of images, and answers as text."""

    def __init__(
        self,
        file: Path,
        image_root: Path | None,
        keep: Keep | None = None,
        *,
        coerce: bool = False,
        unanswered: bool = False,
    ) -> None:
        """`image_root` confines all paths; by default relative ones begin at the file's folder. `keep` stores bytes.

        `coerce` reads numbers and booleans as answers, and `num_coerced` counts them. With `unanswered` the last
        question of a record may lack its answer.
        """
        self.file, self.keep, self.coerce, self.num_coerced = file, keep, coerce, 0
        self._unanswered = unanswered
        self._anchor = os.path.abspath(file.parent if image_root is None else image_root)
        self._inside = os.path.join(self._anchor, "")
        self._is_fenced = image_root is not None
        self._known: dict[str, Path] = {}

    def find(self, reference: Any, origin: str) -> Path:
        """The absolute path of an image; raises RecordsError for URLs to other machines, and bytes without `keep`."""
        if isinstance(reference, str) and reference in self._known:
            return self._known[reference]
        if isinstance(reference, Path):  # a row of the parquet file in which it is embedded
            return reference
        if isinstance(reference, dict):
            refuse_pixel_limits(reference, f"{origin}: an image has")
            references = [reference[key] for key in OBJECT_KEYS if reference.get(key) is not None]
            if not references:
                raise RecordsError(f"{origin}: an image must have `bytes` or `path`, got {kind(reference)}")
            return self.find(references[0], origin)
        if isinstance(reference, bytes):
            return self._keep(reference, origin)
        name = text(reference, "image", origin)
        if len(name) > MAX_PATH and name[:5].lower() != "data:":
            raise RecordsError(f"{origin}: image {kind(name)} is not a path; embedded images are data: URLs in base64")
        if name[:5].lower() == "data:":
            return self._keep(_data_of_url(name, origin), origin)
        path = self._known[name] = self._path(_local(name, origin))
        return path

    def is_open(self, value: Any) -> bool:
        """Whether this stands for the answer to the last question of a record, and may be missing."""
        return self._unanswered and value in (None, "", [])

    def answer(self, value: Any, key: str, origin: str) -> str:
        """An answer as text, a number as JSON writes it; raises RecordsError if it is empty, or may not be a number."""
        if not is_number(value):
            return text(value, key, origin)
        if not self.coerce:
            raise RecordsError(
                f"{origin}: `{key}` must be text that is not empty, got {json.dumps(value)}; put it into quotes, "
                "or write it as text with: lookonce data convert RECORDS OUT --coerce-answers"
            )
        self.num_coerced += 1
        return json.dumps(value)

    def find_id(self, name: str) -> Path | None:
        """The file that is called like an image's name in the dataset, with any suffix; None if there is none.

        This is the only search on the disk: the root and its folder `images` are looked at.
        """
        if (key := f"\0{name}") not in self._known:  # no name of a file
            paths = (self._path(f"{folder}{name}{suffix}") for folder in ID_FOLDERS for suffix in ID_SUFFIXES)
            if file := next((path for path in paths if os.pardir not in path.parts and os.path.isfile(path)), None):
                self._known[key] = file
        return self._known.get(key)

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
            f"{origin}: image {kind(name)} is not on this machine; download it and use its path, because "
            "what a server returns may change"
        )
    host, slash, path = name[match.end() :].partition("/")
    if host not in ("", "localhost"):
        raise RecordsError(f"{origin}: image {kind(name)} names another machine; expected file:///path/to/a.jpg")
    return unquote(slash + path, errors="surrogateescape")


def _data_of_url(name: str, origin: str) -> bytes:
    if not (match := DATA.match(name)):
        raise RecordsError(f"{origin}: image {kind(name)} is not a data: URL in base64")
    try:
        return base64.b64decode("".join(unquote(name[match.end() :]).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordsError(f"{origin}: the embedded image is not base64 ({error}); is it cut off?") from None


def image_name(image: Path, origin: str, *, root: Path, absolute: bool) -> str:
    """The reference to an image of the record `origin` in a file that is being written, relative to `root`.

    Raises:
        RecordsError: it lies outside the root, and may not be `absolute`.
    """
    name = os.path.relpath(image, root)
    is_outside = name == os.pardir or name.startswith(os.pardir + os.sep)
    if os.pardir in image.parts:
        where = f"the root that it was read with, or outside {root}"
        raise RecordsError(f"{origin}: image {image} lies outside {where}; {ELSEWHERE}")
    if is_outside and not absolute:
        raise RecordsError(f"{origin}: image {image} lies outside {root}; {ELSEWHERE}")
    name = os.path.abspath(image) if is_outside else name
    if name.strip() and not (SCHEME.match(name) or name[:5].lower() == "data:"):
        return name
    return f"/.{name}" if is_outside else f"./{name}"  # which is read back as a path


TAG = "<image>"
LEADING = re.compile(r"\s*(?:<image>\s*)*<image>[ \t]*(?:\r?\n)?")
MOVE_IMAGES = "lookonce shows images before the first question; move it there"
MARKUP = r"<img\s[^<>]*>|!\[[^\[\]]*\]\([^()\n]*\)"
MARK = re.compile(
    rf"{MARKUP}"
    r"|<\|?/? ?(?:(?:begin|start|end)_(?:of_)?)?(?:image|img|media)"
    r"(?:[ _#:@-]?(?:\d+|placeholder|token|here|pad|patch|soft_token|context|content|start|begin|end))? ?/?\|?>"
    r"|<\|?[be]oi\|?>|<im_(?:start|end|patch)>|<fake_token_around_image>"
    r"|\[/? ?(?:image|img)(?:[ _#:-]?\d+|_break|_end)? ?\]",
    re.IGNORECASE,
)
"""The image marks of other programs; `<image>` alone is none."""


def remove_tags(question: str, origin: str) -> tuple[str, int]:
    """A question without the tags at its ends, and their number; raises RecordsError if a tag is between its words."""
    without_tags = question[match.end() :] if (match := LEADING.match(question)) else question
    without_tags = _without_last_tags(without_tags)
    if TAG in without_tags:
        raise RecordsError(f"{origin}: {TAG} in the middle of the first question; {MOVE_IMAGES}")
    return without_tags, question.count(TAG)


def _without_last_tags(text: str) -> str:
    """A text without the tags at its end; a regular expression would take the square of their number."""
    end, first = len(text), None
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        if not text.endswith(TAG, 0, end):
            return text if first is None else _without_line_end(text[:first])
        end = first = end - len(TAG)


def _without_line_end(text: str) -> str:
    """What stands before a tag, without the spaces or the line break between the two."""
    text = text.rstrip(" \t")
    return text[:-1].removesuffix("\r") if text.endswith("\n") else text


def check_num_tags(num_tags: int, num_images: int, origin: str) -> None:
    """Check that there is one tag for each image, or none; raises RecordsError."""
    if num_tags not in (0, num_images):
        tags, images = count(num_tags, f"{TAG} tag"), count(num_images, "image")
        raise RecordsError(f"{origin}: {tags} and {images}; expected one tag for each image, or no tags")


def add_tags(question: str, num_images: int, between: str = "") -> str:
    """Return a question with a tag for each image before it, each followed by `between`."""
    needs_line_break = num_images and not between and question[:1].isspace()
    return (TAG + between) * num_images + ("\n" if needs_line_break else "") + question


def check_marks(record: Record) -> None:
    """Check that no text of a record has the mark of another program for an image.

    HTML and Markdown are text where a model may learn to read or write them: in answers, and beside images.

    Raises:
        RecordsError: a text has one; names it.
    """
    if not may_have_marks(record):
        return
    for name, number, content in texts(record):
        for mark in MARK.finditer(content) if "<" in content or "[" in content else ():
            is_markup = re.fullmatch(MARKUP, mark[0], re.IGNORECASE)
            is_text = mark[0] == TAG or (is_markup and (record.images or name != "question"))
            if not is_text:
                where = f"{name} {number}" if number else {"system": "the system text"}.get(name, name)
                raise RecordsError(
                    f"{record.origin}: the image mark {shown(mark[0])} in {where}; name the images of the "
                    "record under its key for images, and remove the mark"
                )
