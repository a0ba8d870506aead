"""Tar shards in WebDataset's layout: which images go into each, its size, and writing it.

Members are `<key>.<extension>`, followed by `<key>.json` if there is JSON about the image. Times, owners and modes are
fixed, so the same images give the same bytes. A tar shard gets its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE

from lookonce.datasets.audit.corpus import ImageInfo
from lookonce.datasets.formats.image_references import suffix_of_format
from lookonce.datasets.images import bytes_key, read_many
from lookonce.disk_space import disk_full
from lookonce.errors import ImageError
from lookonce.files import atomic_write, is_full

KEPT = "Finished tar shards are kept: make room and run the same command again"


@dataclass(frozen=True)
class TarShard:
    """One tar file and its images."""

    name: str
    images: tuple[ImageInfo, ...]

    def member(self, image: ImageInfo) -> str:
        """The path of an image, below the folder of the tar shards."""
        return f"{self.name}/{image.key}{suffix_of_format(image.format)}"


def plan_tar_shards(images: Iterable[ImageInfo], tar_bytes: int) -> list[TarShard]:
    """Tar shards of at most `tar_bytes` bytes of images, in order; a larger image gets one to itself."""
    shards: list[list[ImageInfo]] = []
    room = 0
    for image in images:
        if not shards or image.num_bytes > room:
            shards.append([])
            room = tar_bytes
        shards[-1].append(image)
        room -= image.num_bytes
    return [TarShard(f"images-{number:05}.tar", tuple(shard)) for number, shard in enumerate(shards)]


def tar_size(shard: TarShard, json_of: Mapping[str, bytes]) -> int:
    """The bytes of a tar file: a header and whole blocks per member, two empty blocks, rounded up to whole records."""
    members = [image.num_bytes for image in shard.images]
    members += [len(json_of[image.key]) for image in shard.images if image.key in json_of]
    return _round_up(sum(BLOCKSIZE + _round_up(number, BLOCKSIZE) for number in members) + 2 * BLOCKSIZE, RECORDSIZE)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def write_tar_shard(
    folder: Path, shard: TarShard, json_of: Mapping[str, bytes], progress: Callable[[], object]
) -> None:
    """Write a tar file; `json_of` has the JSON about images by key, `progress` is called for each image.

    Raises:
        ImageError: an image cannot be read, or has changed.
        DiskFull: there is no room.
    """
    from webdataset import TarWriter  # slow to import

    path = folder / shard.name
    try:
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            with TarWriter(file, user="", group="", mode=0o644, mtime=0, encoder=False) as writer:
                for image, data in _read(shard.images):
                    json = {"json": json_of[image.key]} if image.key in json_of else {}
                    # Loaders choose a decoder by the extension, so it follows the image's format, not its old name.
                    writer.write({"__key__": image.key, suffix_of_format(image.format).removeprefix("."): data} | json)
                    progress()
    except OSError as error:
        if is_full(error):
            raise disk_full(folder, tar_size(shard, json_of), error, str(path), KEPT) from None
        raise


def _read(images: Sequence[ImageInfo]) -> Iterator[tuple[ImageInfo, bytes]]:
    by_path = {image.path: image for image in images}
    for path, data in read_many(by_path):
        if isinstance(data, ImageError):
            raise data
        if bytes_key(data) != by_path[path].key:
            raise ImageError(f"{path} changed while it was written; run the same command with another folder")
        yield by_path[path], data
