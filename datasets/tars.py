"""Tar files of images as WebDataset has them: what goes into each, how large it is, and writing it.

Members are `<key>.<extension>`, with `<key>.json` after it where something is to lie beside the image. Times, owners
and modes are fixed, so the same images give the same bytes. A tar appears whole under its name or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE

from lookonce.datasets.audit.pictures import Picture
from lookonce.datasets.images import bytes_key, read_many
from lookonce.errors import DiskFull, ImageError
from lookonce.files import atomic_write, is_full

EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "JPEG2000": "jp2", "TIFF": "tif"}
"""Of Pillow's formats that are not called by their name."""


@dataclass(frozen=True)
class Tar:
    """One tar file and the images that belong into it."""

    name: str
    pictures: tuple[Picture, ...]

    def member(self, picture: Picture) -> str:
        """The path of an image, below the pack's folder."""
        return f"{self.name}/{picture.key}.{extension(picture)}"


def plan_tars(pictures: Iterable[Picture], tar_bytes: int) -> list[Tar]:
    """The images in their order, in tars of at most so many bytes of images; a larger image has one to itself."""
    parts: list[list[Picture]] = []
    room = 0
    for picture in pictures:
        if not parts or picture.num_bytes > room:
            parts.append([])
            room = tar_bytes
        parts[-1].append(picture)
        room -= picture.num_bytes
    return [Tar(f"images-{number:05}.tar", tuple(part)) for number, part in enumerate(parts)]


def extension(picture: Picture) -> str:
    """By what the file is, not by what it is called: loaders choose a decoder by it."""
    return EXTENSIONS.get(picture.format, picture.format.lower())


def tar_size(tar: Tar, beside: Mapping[str, bytes]) -> int:
    """The bytes of a tar file: each member after a header, in whole blocks; two empty ones; in whole records."""
    members = [picture.num_bytes for picture in tar.pictures]
    members += [len(beside[picture.key]) for picture in tar.pictures if picture.key in beside]
    return _round_up(sum(BLOCKSIZE + _round_up(number, BLOCKSIZE) for number in members) + 2 * BLOCKSIZE, RECORDSIZE)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def write_tar(folder: Path, tar: Tar, beside: Mapping[str, bytes], progress: Callable[[], object]) -> None:
    from webdataset import TarWriter  # slow to import

    try:
        with atomic_write(folder / tar.name) as temporary, temporary.open("wb") as file:
            with TarWriter(file, user="", group="", mode=0o644, mtime=0, encoder=False) as writer:
                for picture, data in _read(tar.pictures):
                    more = {"json": beside[picture.key]} if picture.key in beside else {}
                    writer.write({"__key__": picture.key, extension(picture): data} | more)
                    progress()
    except OSError as error:
        if is_full(error):
            raise DiskFull(
                f"no room for {folder / tar.name} ({error.strerror}); what is finished is kept: make room and run the "
                "same command again"
            ) from None
        raise


def _read(pictures: Sequence[Picture]) -> Iterator[tuple[Picture, bytes]]:
    by_path = {picture.path: picture for picture in pictures}
    for path, data in read_many(by_path):
        if isinstance(data, ImageError):
            raise data
        if bytes_key(data) != by_path[path].key:
            raise ImageError(f"{path} changed while it was packed; run the same command with another folder")
        yield by_path[path], data
