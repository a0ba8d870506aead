"""Tar files: their members, or WebDataset samples of members with the same key.

Design: a file is streamed through once, with one member or one sample in memory. The cost: reading the last member
reads the whole file, about half a second per gigabyte that the system has cached. Nothing is unpacked, so names and
links lead nowhere. The headers are those of whoever wrote the file: a member is read if the file itself is as long, so
neither compression nor a sparse member makes much of little, and a name or a PAX header of more than a megabyte is
refused. webdataset, which groups samples, would decompress and read members of any size.

A tar file to which members were added again (`tar -r`) has two of one name, and programs take the first or the last. So
it is refused, by its headers, which takes 50 microseconds a member; the rest of the file is not read for it.

webdataset takes long to import and is imported when the first samples are read.
"""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

from lookonce.datasets.readers.image_column import MAX_IMAGE_BYTES
from lookonce.errors import RecordsError
from lookonce.text import shell

BUFFER_BYTES = 1 << 20
HEADER_BUFFER_BYTES = 1 << 12
MAX_HEADER_BYTES = 1 << 20
"""The longest extended header; it has a long name, or PAX records."""
EXTENDED = (*(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK), tarfile.XHDTYPE, tarfile.XGLTYPE, b"X")
"""The types of extended headers."""
COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
"""The first bytes of compressed files, and the command that decompresses them."""
HARMFUL = re.compile(rb"[0-9]{256}|GNU\.sparse")
"""What PAX records of image archives do not have: sparse members, and numbers on which Python's search for a character
set takes the square of their length (CVE-2024-6232)."""
DAMAGED = (ValueError, LookupError, OSError, EOFError, tarfile.TarError, RecursionError)
"""What tarfile and webdataset raise for damaged files."""
NUM_PEEKED = 16
"""A sample's JSON member is expected among this many first members."""


def read_members(
    path: Path, select: Callable[[str], bool] | None = None, buffer_bytes: int = BUFFER_BYTES
) -> Generator[tuple[str, bytes]]:
    """Names and bytes of all members, or of those whose names `select` accepts; links and folders are skipped."""
    with path.open("rb", buffering=buffer_bytes) as file:
        _refuse_compressed(file)
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


def repeated_members(path: Path, key: Callable[[str], Hashable] = normal) -> dict[Hashable, list[str]]:
    """The names of members that have the same key, by it; of a damaged file, those before the damage."""
    names: dict[Hashable, list[str]] = {}

    def note(name: str) -> bool:
        names.setdefault(key(name), []).append(name)
        return False

    with suppress(*DAMAGED), closing(read_members(path, note, HEADER_BUFFER_BYTES)) as members:
        for _ in members:
            pass
    return {key: some for key, some in names.items() if len(some) > 1}


def twice(path: Path, names: list[str]) -> str:
    """What is wrong with a tar file in which these names mean one member, and what to do."""
    first, second = names[:2]
    if normal(first) != normal(second):
        return f"{path} has the members {first!r} and {second!r} of one name; remove one of them, and pack it again"
    file = shell(path)
    return (
        f"{path} has the member {normal(first)!r} twice; pack it again, with the last of each name: "
        f"mkdir DIR && tar -xf {file} -C DIR && tar --sort=name -cf NEW.tar -C DIR ."
    )


def _refuse_compressed(file: BinaryIO) -> None:
    head = file.read(6)
    file.seek(0)
    for magic, command in COMPRESSED.items():
        if head.startswith(magic):
            raise tarfile.ReadError(f"it is compressed; decompress it once, with `{command}`")


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


def read_samples(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Samples: `__key__`, `__url__` (which is `name`), and the bytes of each member by its suffix.

    Raises:
        RecordsError: a member is in the file twice.
    """
    from webdataset.tariterators import base_plus_ext, group_by_keys

    def key(member: str) -> Hashable:
        base, suffix = base_plus_ext(member)
        return (normal(base), suffix.lower()) if base else normal(member)

    for names in repeated_members(path, key).values():
        raise RecordsError(twice(path, names))
    with closing(read_members(path)) as members:
        yield from group_by_keys({"fname": member, "data": data, "__url__": name} for member, data in members)


def has_json(path: Path) -> bool:
    """Whether a tar file has samples with JSON, not images alone; True for a damaged one, so that reading it fails."""
    try:
        with closing(read_members(path)) as members:
            return any(name.endswith(".json") for name, _ in islice(members, NUM_PEEKED))
    except DAMAGED:
        return True
