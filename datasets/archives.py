"""Images inside archives: tar files, and parquet files in which they are embedded.

An image's path may lead into an archive:

    /data/frames-000.tar/polyp/a.jpg    the member polyp/a.jpg of a tar file
    /data/train-0000.parquet/17         row 17, counted from 0

A folder that is called `x.tar` is a folder.

Design: an archive is streamed through once and only the wanted members are kept. It is not unpacked, so names and links
lead nowhere, and no table of its members is stored, which could be wrong. A tar file is read up to the last wanted
member, each time that members are requested, about half a second per gigabyte that the system has cached; so request
many at once. Parquet skips row groups without wanted rows, and needs two to three times the memory of one row group.
Compressed tar files are refused: they would be decompressed from the beginning each time.

The headers of a tar file are hostile: a member is read if the file itself is as long, so compression and sparse members
cannot make much of little, and a name or a PAX header of more than a megabyte is refused. A name that is there twice
(`tar -r`) is refused, because programs take the first or the last; finding these takes 50 microseconds a member.
"""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Self

from lookonce.datasets.parquet import (
    IMAGE_ROWS,
    MAX_IMAGE_BYTES,
    ambiguous,
    find_image_column,
    open_parquet,
    read_values,
)
from lookonce.datasets.text_files import COMPRESSED
from lookonce.errors import ImageError
from lookonce.text import first_line, shell

BUFFER_BYTES = 1 << 20
HEADER_BUFFER_BYTES = 1 << 12
MAX_HEADER_BYTES = 1 << 20
"""The longest extended header; it has a long name, or PAX records."""
EXTENDED = (*(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK), tarfile.XHDTYPE, tarfile.XGLTYPE, b"X")
HARMFUL = re.compile(rb"[0-9]{256}|GNU\.sparse")
"""What PAX records of image archives do not have: sparse members, and numbers on which Python's search for a character
set takes the square of their length (CVE-2024-6232)."""
DAMAGED = (ValueError, LookupError, OSError, EOFError, tarfile.TarError, RecursionError)
"""What tarfile raises for damaged files."""


def read_tar_members(
    path: Path, select: Callable[[str], bool] | None = None, buffer_bytes: int = BUFFER_BYTES
) -> Generator[tuple[str, bytes]]:
    """Names and bytes of all members, or of those whose names `select` accepts; links and folders are skipped."""
    with path.open("rb", buffering=buffer_bytes) as file:
        head = file.read(6)
        file.seek(0)
        if command := next((command for magic, command in COMPRESSED.items() if head.startswith(magic)), ""):
            raise tarfile.ReadError(f"it is compressed; decompress it once, with `{command}`")
        num_bytes = os.fstat(file.fileno()).st_size
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as archive:
            kept: list[tarfile.TarInfo] = vars(archive)["members"]
            while (member := archive.next()) is not None:
                kept.clear()  # else all members would stay in memory
                if member.isreg() and (select is None or select(member.name)):
                    yield member.name, _content(file, member, num_bytes)


def normal(name: str) -> str:
    """A member's name as it ends a path; `tar` itself writes `./a.jpg`."""
    return posixpath.normpath(name).lstrip("/")


@lru_cache(maxsize=1024)
def _repeated(path: Path, *stamp: int) -> frozenset[str]:
    """The names that a tar file has twice; `stamp` is its size and time, so a file that changes is read again.

    Of a damaged file they are those before the damage.
    """
    names: Counter[str] = Counter()

    def note(name: str) -> bool:
        names[normal(name)] += 1
        return False

    with suppress(*DAMAGED), closing(read_tar_members(path, note, HEADER_BUFFER_BYTES)) as members:
        for _ in members:
            pass
    return frozenset(name for name, number in names.items() if number > 1)


def _content(file: BinaryIO, member: tarfile.TarInfo, num_bytes: int) -> bytes:
    """The bytes of a member; there are as many in the file, so a header alone takes no memory."""
    if member.offset_data + member.size > num_bytes:
        raise tarfile.ReadError("unexpected end of data")
    if member.size > MAX_IMAGE_BYTES:
        raise tarfile.ReadError(f"{member.name!r} has {member.size:,} bytes; the limit is {MAX_IMAGE_BYTES:,}")
    file.seek(member.offset_data)
    return file.read(member.size)


class _Member(tarfile.TarInfo):
    """A member whose header is checked before Python follows it: it is short, not sparse, and leads on in the file."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        file: Any = tarfile_.fileobj
        start = file.tell()
        header = file.read(tarfile.BLOCKSIZE)
        kind = header[156:157]
        if kind == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("it has a sparse member; pack it without --sparse")
        if kind in EXTENDED:
            size = cls.frombuf(header, tarfile_.encoding or "utf-8", "surrogateescape").size
            if not 0 <= size <= MAX_HEADER_BYTES or HARMFUL.search(file.read(size)):
                raise tarfile.ReadError(f"it has a header of {size:,} bytes that no archive of images has")
        file.seek(start)
        member = super().fromtarfile(tarfile_)
        if member.size < 0 or tarfile_.offset <= start:
            raise tarfile.ReadError("a member has a negative size")
        return member


ARCHIVE = re.compile(r"[^/]\.(?:tar|tar\.gz|tgz|parquet)(?=/)", re.IGNORECASE)
"""Ends where a folder of a path has the name of an archive."""
NO_BYTES = "its row has no image bytes; write the archive with the images embedded"
ROW = re.compile(r"0|[1-9][0-9]{0,17}")


def find_archive(path: Path, is_file: Callable[[str], bool] = os.path.isfile) -> Path | None:
    """The archive that a path leads into, or None.

    The disk is not accessed for a path that leads out of the image root.
    """
    name = str(path)
    ends = [match.end() for match in ARCHIVE.finditer(name)]
    if not ends or leads_out(path):
        return None
    return next((Path(name[:end]) for end in ends if is_file(name[:end])), None)


def by_archive(paths: Iterable[Path]) -> tuple[list[Path], dict[Path, list[Path]]]:
    """Single files, and the members of each archive, in the order given; duplicate paths are returned once."""
    is_file = cache(os.path.isfile)
    files: list[Path] = []
    members_of: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        archive = find_archive(path, is_file)
        (files if archive is None else members_of.setdefault(archive, [])).append(path)
    return files, members_of


def leads_out(path: Path) -> bool:
    """Whether a record's image lies outside the image root: then, and only then, its path keeps `..` components."""
    return os.pardir in path.parts


def unreadable(path: Path, reason: str) -> ImageError:
    """The error for an image that cannot be read; unprintable characters of its name are escaped."""
    message = f"cannot read image {path}: {reason}"
    return ImageError("".join(char if char.isprintable() else ascii(char)[1:-1] for char in message))


def read_members(archive: Path, paths: Iterable[Path]) -> Iterator[tuple[Path, bytes | ImageError]]:
    """The bytes of some members of an archive, in the order of the archive, then the errors of those not found."""
    waiting = {path.relative_to(archive).as_posix(): path for path in paths}
    reason = "the archive has no such member, or is cut off before it"
    try:
        with closing(_open(archive, waiting.keys())) as members:
            for name, data in members:
                path = waiting.pop(name)
                yield path, data if isinstance(data, bytes) else unreadable(path, data)
                if not waiting:
                    return
    except ImageError as error:
        reason = str(error)
    except ImportError:  # the installation is damaged, not the archive
        raise
    except Exception as error:  # the errors of tarfile, zlib and pyarrow for damaged files have no common base
        reason = _damage(error)
    for path in waiting.values():
        yield path, unreadable(path, reason)


def _open(archive: Path, names: Collection[str]) -> Any:
    """A generator of the members `names`, each with its bytes or the reason why it has none."""
    suffix = archive.suffix.lower()
    if suffix in (".gz", ".tgz"):
        raise ImageError(
            f"compressed tar files are not supported; decompress it once, with `{shell('gunzip', archive)}`"
        )
    return _read_parquet(archive, names) if suffix == ".parquet" else _read_tar(archive, names)


def _damage(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"the archive cannot be read ({error.strerror})"
    text = first_line(error)
    return f"the archive is cut off or damaged ({text or type(error).__name__})"


def _read_tar(archive: Path, names: Collection[str]) -> Iterator[tuple[str, bytes | str]]:
    state, file = archive.stat(), shell(archive)
    for name in _repeated(archive, state.st_size, state.st_mtime_ns).intersection(names):
        yield (
            name,
            f"{archive} has the member {name!r} twice; pack it again, with the last of each name: "
            f"mkdir DIR && tar -xf {file} -C DIR && tar --sort=name -cf NEW.tar -C DIR .",
        )
    with closing(read_tar_members(archive, lambda name: normal(name) in names)) as members:
        for name, data in members:
            yield normal(name), data


def _read_parquet(archive: Path, names: Collection[str]) -> Iterator[tuple[str, bytes | str]]:
    with open_parquet(archive) as file:
        image = find_image_column(file.schema_arrow)
        if image is None:
            raise ambiguous(file.schema_arrow)
        sizes = (file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
        starts = list(accumulate(sizes, initial=0))
        groups: dict[int, dict[int, str]] = defaultdict(dict)
        for name in filter(ROW.fullmatch, names):
            if (row := int(name)) < starts[-1]:
                groups[bisect_right(starts, row) - 1][row] = name
        for group, name_of in sorted(groups.items()):
            try:
                for row, value in enumerate(read_values(file, image.bytes_field, IMAGE_ROWS, [group]), starts[group]):
                    if row in name_of:
                        cell = value.as_py()
                        data = cell.get("bytes") if isinstance(cell, dict) else cell
                        yield name_of.pop(row), data if isinstance(data, bytes) else NO_BYTES
                    if not name_of:
                        break
            except Exception as error:  # as in `read_members`; the other row groups may be intact
                yield from ((name, _damage(error)) for name in name_of.values())
