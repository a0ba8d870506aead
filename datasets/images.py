"""Image files: their keys, their stamps, their headers and their pixels.

Design: the key of an image is the sha256 of the file's bytes, full width: content, not path. Two files with the same
bytes are one image; an edited file is another image whatever its name, so stale features are never used for it. The
cost is reading every image file once, about a second per gigabyte from a local disk. A key is never truncated:
truncated keys have shown models the wrong image (https://github.com/LMCache/LMCache/issues/4086).

A stamp finds files that have changed without reading them, at the cost of one `stat` per file. It has the time of the
last status change (ctime), which no program can set, beside size and modification time, which `cp -p`, rsync and
archives set. The same stamp means the same bytes; with another stamp a file is hashed again. A file that was changed
just before has no stamp, since it may change again in the same tick of the filesystem's clock. Before an image is
encoded, its bytes are compared with its key anyway.

Images are single files or members of archives (archives.py). One that cannot be read is listed with the reason; it is
an error only if none can be read. Only the bytes of a few files, and of a few members of each archive, are in memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from time import time as now
from typing import Literal, NamedTuple

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm
from xxhash import xxh3_128_digest

from lookonce.datasets.archives import by_archive, find_archive, leads_out, read_members, unreadable
from lookonce.datasets.augment import Augment, Variant
from lookonce.datasets.parquet import MAX_IMAGE_BYTES
from lookonce.datasets.records import Record
from lookonce.errors import BadImage, ImageError
from lookonce.files import threaded_map
from lookonce.text import count, first_few, nfc, shell

Stamp = tuple[int, int, int]
"""Size in bytes, and the times of the last modification and status change in nanoseconds."""
TICK_S = 2
"""The resolution of the coarsest filesystem clocks."""
NUM_AT_ONCE = 64
"""Number of files that a thread is handed at once: handing one over takes longer than its `stat` on a local disk."""


def stamps(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    """The stamp of each image's file, or of its archive; None if there is none."""
    files, members_of = by_archive(paths)
    chunks = [files[start : start + NUM_AT_ONCE] for start in range(0, len(files), NUM_AT_ONCE)]
    stamped = chain.from_iterable(threaded_map(lambda paths: [stamp(path) for path in paths], chunks))
    stamp_of = dict(zip(files, stamped, strict=True))
    for archive, members in members_of.items():
        stamp_of |= dict.fromkeys(members, stamp(archive))
    return stamp_of


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file; None if it does not exist or was changed a moment ago."""
    with contextlib.suppress(OSError, ValueError):
        status = path.stat()
        if max(status.st_mtime, status.st_ctime) < now() - TICK_S:
            return status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return None


def is_gone(path: Path) -> bool:
    """Whether an image's file, or its archive, does not exist or cannot be reached."""
    try:
        (find_archive(path) or path).stat()
    except (OSError, ValueError):
        return True
    return False


NUM_NAMED = 5
UNDECODABLE = (
    *(OSError, ValueError, SyntaxError, RuntimeError, TypeError, LookupError, ArithmeticError, struct.error),
    Image.DecompressionBombError,
)
"""The errors of Pillow for broken images and other files; most were found with random damage."""

MAX_RATIO = 200
"""The largest ratio of the longer side to the shorter that Qwen's image processor accepts."""
SIDEWAYS = (5, 6, 7, 8)
"""The EXIF orientations in which an image is shown with its width and height exchanged."""
PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""What the chunks of a PNG that may hold its orientation begin with."""

Size = tuple[int, int]
"""Width and height in pixels as the image is shown: after its EXIF orientation."""
Trait = Literal["alpha", "transparent", "deep", "cmyk", "animated"]
"""What 8-bit RGB does not keep of an image: an alpha channel, a transparent colour, more than 8 bits a channel, inks,
frames after the first."""


class Header(NamedTuple):
    size: Size
    format: str
    """The name that Pillow gives the format: JPEG, PNG, ..."""
    mode: str
    """The name that Pillow gives the kind of pixels: RGB, L, ..."""
    traits: tuple[Trait, ...]


@dataclass(frozen=True)
class ImageInfo:
    """One image file, or member of an archive."""

    path: Path
    key: str = ""
    """The sha256 of its bytes; empty if they cannot be read."""
    num_bytes: int = 0
    header: Header | None = None
    """None if the image cannot be encoded."""
    problem: str = ""
    """Why the image cannot be used; empty if nothing was found wrong with it."""

    @property
    def is_missing(self) -> bool:
        """Whether its bytes cannot be read."""
        return not self.key

    @property
    def size(self) -> Size | None:
        """Width and height as the image is shown; None if it cannot be encoded."""
        return self.header and self.header.size


@dataclass(frozen=True)
class ImageIndex:
    key_of: dict[Path, str]
    """The key of each file that can be read."""
    path_of: dict[str, Path]
    """One file for each key, in the best order for reading: single files by key, then archive by archive the members
    in their order. The key of a variant has the file of its image."""
    size_of: dict[str, Size | None] = field(default_factory=dict)
    """Width and height by key, from the header; None if the image cannot be encoded."""
    transparent: frozenset[str] = frozenset()
    """The keys of images with a transparent colour, of those that were read."""
    unusable: dict[Path, str] = field(default_factory=dict)
    """Why each of the other files cannot be read."""
    stamp_of: dict[Path, Stamp] = field(default_factory=dict)
    """The stamps of files before they were read, without those that were just written."""
    former: dict[str, Path] = field(default_factory=dict)
    """The keys in a trusted plan of files that may have changed since. No record refers to them, but a planned shard is
    built without them if they are missing."""
    variants: dict[str, Variant] = field(default_factory=dict)
    """The variants of images by key; those that are images themselves are not among them."""

    def keys_of(self, record: Record) -> tuple[str, ...]:
        """The keys of a record's images; of those that cannot be read, their paths."""
        return tuple(self.key_of.get(path, str(path)) for path in record.images)

    @property
    def num_files(self) -> int:
        """The number of files that the records name, usable or not."""
        return len(self.key_of) + len(self.unusable)

    @property
    def num_distinct(self) -> int:
        return len(self.path_of) - len(self.variants)

    def with_variants(self, augment: Augment, records: Iterable[Record]) -> ImageIndex:
        """The images, and variants of those of some records; raises UsageError if answers would not be true of them."""
        records = list(records)
        augment.check(records)
        trained = {self.key_of.get(path) for record in records for path in record.images}
        variants = {variant.key: variant for key in self.path_of if key in trained for variant in augment.of(key)}
        path_of = self.path_of | {key: self.path_of[variant.of] for key, variant in variants.items()}
        size_of = self.size_of | {key: self.size_of.get(variant.of) for key, variant in variants.items()}
        return replace(self, path_of=path_of, size_of=size_of, variants=variants)


def image_key(path: Path | str) -> str:
    """The sha256 of the file's bytes, 64 hexadecimal digits; raises ImageError if it cannot be read."""
    return bytes_key(read_bytes(Path(path)))


def bytes_key(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def open_image(data: bytes) -> Image.Image:
    """The image in the bytes of a file, whose pixels are not decoded yet; raises one of UNDECODABLE.

    An EPS file is a program, which Pillow has Ghostscript run, and is refused.
    """
    if not data:
        raise UnidentifiedImageError("the file is empty")
    image = Image.open(io.BytesIO(data))
    if image.format == "EPS":
        raise UnidentifiedImageError("an EPS file is a program; convert it to PNG")
    return image


@contextmanager
def _opened(data: bytes, path: Path) -> Iterator[Image.Image]:
    """The opened image; whatever Pillow raises for it becomes a BadImage that names `path`."""
    try:
        with open_image(data) as image:
            yield image
    except UnidentifiedImageError as error:
        more = "" if "cannot identify" in str(error) else f" ({error})"
        raise BadImage(f"cannot decode image {path}: unknown image format{more}") from None
    except (*UNDECODABLE, MemoryError) as error:
        raise BadImage(f"cannot decode image {path}: {error}") from None


def read_header(data: bytes, path: Path) -> Header:
    """The header of an image file, if the file can be encoded as far as the header tells; errors name `path`.

    Raises:
        BadImage: it is not an image, has too many pixels or none, is too long and thin, or has colours that cannot be
            converted to RGB. A build gives the same reason.
    """
    with _opened(data, path) as image:
        size = _shown_size(image, data)
        if not all(size):
            raise BadImage(f"cannot decode image {path}: it has {size[0]} x {size[1]} pixels")
        if (ratio := max(size) / min(size)) > MAX_RATIO:  # in the words of transformers
            raise BadImage(f"{path}: absolute aspect ratio must be smaller than {MAX_RATIO}, got {ratio}")
        Image.new(image.mode, (1, 1)).convert("RGB")
        return Header(size, image.format or "", image.mode, tuple(_traits(image)))


def _shown_size(image: Image.Image, data: bytes) -> Size:
    """The size after `ImageOps.exif_transpose`, without decoding pixels where the header has the orientation."""
    if image.format == "TIFF":  # of which Pillow itself gives the size as shown
        return image.size
    if image.format == "PNG" and any(data.find(chunk, data.find(b"IDAT")) >= 0 for chunk in PNG_ORIENTATION):
        with contextlib.suppress(*UNDECODABLE):  # a file that is cut off has the size that its beginning says
            image.load()  # what follows the pixels is read after them
    # `image.getexif()` would decode the pixels of every PNG.
    is_sideways = Image.Image.getexif(image).get(ExifTags.Base.Orientation) in SIDEWAYS
    return (image.height, image.width) if is_sideways else image.size


def _traits(image: Image.Image) -> Iterator[Trait]:
    note = image.info.get("transparency")
    if isinstance(note, bytes) or image.getbands()[-1] in ("A", "a"):
        yield "alpha"
    elif note is not None:
        yield "transparent"
    if image.mode[0] in "IF":
        yield "deep"
    if image.mode == "CMYK":
        yield "cmyk"
    if image.format != "MPO" and getattr(image, "is_animated", False):  # cameras add previews to a photograph
        yield "animated"


def image_size(data: bytes) -> Size | None:
    """Width and height as shown, from the header of an image file; None if it cannot be encoded."""
    try:
        return read_header(data, Path()).size
    except BadImage:
        return None


def decode(data: bytes, path: Path) -> Image.Image:
    """The image in the bytes of a file as transformers' `load_image` gives it; errors name `path`.

    Its EXIF orientation is applied, and it is converted to RGB. A transparent colour is noted in its `info`.

    Raises:
        BadImage: the header tells that it cannot be encoded, or its pixels cannot be decoded.
    """
    read_header(data, path)
    with _opened(data, path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def read_bytes(path: Path) -> bytes:
    """The bytes of an image, a file or a member of an archive; raises ImageError, which says why it cannot be read."""
    archive = find_archive(path)
    data = _read_file(path) if archive is None else next(_read_archive(archive, [path]))[1]
    if isinstance(data, ImageError):
        raise data
    return data


def read_many(paths: Iterable[Path]) -> Iterator[tuple[Path, bytes | ImageError]]:
    """The bytes of images, each path once, or the error of those that cannot be read.

    Single files come first, in order, prefetched on threads; then each archive is streamed once, with the members in
    its order. If the paths are in the order of `ImageIndex.path_of`, that order is kept.
    """
    files, members_of = by_archive(paths)
    yield from zip(files, threaded_map(_read_file, files), strict=True)
    for archive, members in members_of.items():
        yield from _read_archive(archive, members)


def count_images(paths: Iterable[Path]) -> int:
    """The number of images at these paths, where the rows of parquet files are compared by content."""
    files, members_of = by_archive(paths)
    rows = [path for archive, inside in members_of.items() if archive.suffix.lower() == ".parquet" for path in inside]
    num_others = len(files) + sum(map(len, members_of.values())) - len(rows)
    read = tqdm(read_many(rows), "compare images", len(rows), unit="row", leave=False, disable=None)
    return num_others + len({path if isinstance(data, ImageError) else xxh3_128_digest(data) for path, data in read})


def index_images(records: Iterable[Record], known: ImageIndex | None = None, *, needs_one: bool = True) -> ImageIndex:
    """Find the key and the size of every image that the records name; `known` images are not read again.

    Raises:
        ImageError: with `needs_one`, none of them can be read; names the first few with their records.
    """
    known = known or ImageIndex({}, {})
    origin_of: dict[Path, str] = {}
    for record in records:
        for path in record.images:
            if path not in known.key_of:
                origin_of.setdefault(path, record.origin)
    if known.key_of and not origin_of:
        return known
    stamp_of = {path: stamp for path, stamp in stamps(origin_of).items() if stamp}
    inspected = inspect_images(origin_of)
    unusable = {path: inspected[path].problem for path in origin_of if inspected[path].is_missing}
    if needs_one and unusable and len(unusable) == len(origin_of) and not known.key_of:
        named = "\n".join(first_few([f"{reason} ({origin_of[path]})" for path, reason in unusable.items()], NUM_NAMED))
        raise ImageError(
            f"no image can be read; {count(len(unusable), 'image')} tried:\n{named}\n"
            "Check `data.image_root` in the run file; image paths are relative to it."
        )
    images = distinct(inspected)
    path_of = {key: image.path for key, image in images.items()} | known.path_of
    return ImageIndex(
        key_of=known.key_of
        | {path: inspected[path].key for path in sorted(inspected) if not inspected[path].is_missing},
        path_of=path_of,
        size_of={key: image.size for key, image in images.items()} | known.size_of,
        transparent=known.transparent.union(
            key for key, image in images.items() if image.header and "transparent" in image.header.traits
        ),
        unusable=unusable,
        stamp_of=known.stamp_of | stamp_of,
        former={key: path for key, path in known.former.items() if key not in path_of},
    )


def inspect_images(paths: Iterable[Path], *, decode: bool = False) -> dict[Path, ImageInfo]:
    """Inspect each image once, in the order of `ImageIndex.path_of`; those that cannot be read come last.

    Archives are read in parallel. `decode` decodes whole images, as a build does, which finds truncated files and takes
    ten to a hundred times as long as a header. Threads are enough, since Pillow releases Python's lock.
    """
    paths = sorted(set(paths))
    files, members_of = by_archive(paths)
    inspect = partial(_inspect, is_whole=decode)
    with tqdm(total=len(paths), desc="inspect images", unit="image", leave=False, disable=None) as progress:

        def counted(images: Iterable[ImageInfo]) -> list[ImageInfo]:
            inspected = []
            for image in images:
                inspected.append(image)
                progress.update()
            return inspected

        def of_archive(archive: Path) -> list[ImageInfo]:
            members = _read_archive(archive, members_of[archive])
            return counted(threaded_map(inspect, members) if decode else map(inspect, members))

        inspected_images = counted(threaded_map(lambda path: inspect((path, _read_file(path))), files))
        inspected_images.sort(key=lambda image: (image.key, image.path))
        for members in threaded_map(of_archive, members_of):
            inspected_images += members
    return {image.path: image for image in sorted(inspected_images, key=lambda image: image.is_missing)}


def _inspect(read: tuple[Path, bytes | ImageError], *, is_whole: bool) -> ImageInfo:
    path, data = read
    if isinstance(data, ImageError):
        return ImageInfo(path, problem=str(data))
    key = bytes_key(data)
    try:
        header = read_header(data, path)
        if is_whole:
            decode(data, path)
    except BadImage as error:
        return ImageInfo(path, key, len(data), problem=str(error))
    return ImageInfo(path, key, len(data), header)


def distinct(images: Mapping[Path, ImageInfo]) -> dict[str, ImageInfo]:
    """One image for each key, in their order, without those that cannot be read."""
    image_of: dict[str, ImageInfo] = {}
    for image in images.values():
        if not image.is_missing:
            image_of.setdefault(image.key, image)
    return image_of


def _read_archive(archive: Path, paths: list[Path]) -> Iterator[tuple[Path, bytes | ImageError]]:
    for path, data in read_members(archive, paths):
        problem = "" if isinstance(data, ImageError) else _too_large(len(data))
        yield path, unreadable(path, problem) if problem else data


def _read_file(path: Path) -> bytes | ImageError:
    if leads_out(path):
        return unreadable(path, "it leads out of the image root; keep images below the root")
    try:
        # Opening a FIFO without a writer would block forever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            regular = stat.S_ISREG(status.st_mode)
            problem = _too_large(status.st_size) if regular else "it is a FIFO or a device; expected a file"
            return unreadable(path, problem) if problem else file.read()
    except (OSError, ValueError, MemoryError) as error:
        return unreadable(path, _unreadable_reason(path, error))


@lru_cache(maxsize=8)
def _names_in_nfc(folder: Path) -> frozenset[str]:
    """The names in a folder that are not ASCII, in NFC."""
    with contextlib.suppress(OSError):
        return frozenset(nfc(name) for name in os.listdir(folder) if not name.isascii())
    return frozenset()


def _too_large(num_bytes: int) -> str:
    if num_bytes <= MAX_IMAGE_BYTES:
        return ""
    limit = f"more than an image may have (the limit is {MAX_IMAGE_BYTES:,})"
    return f"it has {num_bytes:,} bytes, {limit}; is it an image?"


def _unreadable_reason(path: Path, error: Exception) -> str:
    if not isinstance(error, OSError):
        return (
            "there is not enough memory" if isinstance(error, MemoryError) else f"it is not a valid file name ({error})"
        )
    if error.errno == errno.ENOENT and path.is_symlink():
        return f"it is a link to {path.readlink()}, which does not exist"
    if error.errno == errno.ENOENT and nfc(path.name) in _names_in_nfc(path.parent):
        form = "nfc" if path.name == nfc(path.name) else "nfd"
        command = shell("convmv", "-r", "-f", "utf-8", "-t", "utf-8", f"--{form}", "--notest", path.parent)
        return f"there is a file of this name in another normal form of Unicode; rename it, for example with: {command}"
    kind = {errno.EISDIR: "a folder", errno.ENXIO: "a socket"}.get(error.errno or 0)
    return f"it is {kind}; expected a file" if kind else error.strerror or str(error)
