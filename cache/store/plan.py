"""The plan of a cache: which images belong to which shard.

Design: the plan is written before the first image is encoded and only ever appended to, so any number of workers,
restarted any number of times, divide the images in the same way. Images are cut into shards by planned size, in the
order in which they are fastest to read. A cache that is asked for more images gets more shards; existing ones do not
change. For each image the plan has the number of tokens, from the image's header, and the files in which it was found,
so workers and trainings can begin without hashing files; the stamps show which files may have changed. An extension
also records other files of images that are planned already, such as those of a moved dataset. The cost is about 150
bytes per image.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lookonce.cache.store.receipts import natural, text_of
from lookonce.datasets.images import Stamp

MAX_IMAGES = 16_384
"""The most images of a shard, which keeps its header far below the limit of 100 MB of safetensors."""
SHARD_NAME = re.compile(r"shard-[0-9]{5,18}")
"""What files of a cache are named after, so no other name is taken from a plan file."""


@dataclass(frozen=True)
class PlannedImage:
    """An image to encode."""

    key: str
    num_tokens: int
    """Computed from the size in the image's header; 0 if that is unreadable."""
    files: tuple[str, ...]
    """The files in which the image was found; bytes are checked against the key when they are read."""
    stamps: tuple[Stamp | None, ...] = ()
    """The stamp of each file, taken before it was hashed; None where it is unknown."""
    is_transparent: bool = False
    """Whether the file marks a colour as transparent, which is painted white; unknown in plans of version 0.2."""


@dataclass(frozen=True)
class Shard:
    """A planned shard: its name and its images."""

    name: str
    images: tuple[PlannedImage, ...]

    @property
    def keys(self) -> list[str]:
        return [image.key for image in self.images]

    @property
    def num_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **images_to_json(self.images)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Shard:
        """The shard of `to_json`.

        Raises:
            ValueError: its name is not that of a shard, or its images are broken; KeyError, TypeError likewise.
        """
        if not SHARD_NAME.fullmatch(name := text_of(value["name"])):
            raise ValueError(f"{name!r} is not the name of a shard")
        return cls(name, images_from_json(value))


def images_to_json(images: Sequence[PlannedImage]) -> dict[str, Any]:
    """Images as columns: one list for each field."""
    transparent = [image.key for image in images if image.is_transparent]
    return {
        "keys": [image.key for image in images],
        "num_tokens": [image.num_tokens for image in images],
        "files": [list(image.files) for image in images],
        "stamps": [list(image.stamps) for image in images],
    } | ({"transparent": transparent} if transparent else {})


def images_from_json(value: dict[str, Any]) -> tuple[PlannedImage, ...]:
    """The images of `images_to_json`; stamps may be missing. Values of other types are a ValueError or a TypeError."""
    keys, files = [*map(text_of, value["keys"])], (tuple(map(text_of, row)) for row in value["files"])
    stamps = (tuple(map(_stamp, row)) for row in value.get("stamps", [()] * len(keys)))
    transparent = {*map(text_of, value.get("transparent", ()))}
    marks = (key in transparent for key in keys)
    columns = zip(keys, map(natural, value["num_tokens"]), files, stamps, marks, strict=True)
    return tuple(PlannedImage(*column) for column in columns)


def _stamp(value: Any) -> Stamp | None:
    if value is None:
        return None
    num_bytes, *times = value
    if any(type(time_ns) is not int for time_ns in times):  # it may be before 1970
        raise ValueError(f"{times!r} are not times")
    return (natural(num_bytes), times[0], times[1]) if len(times) == 2 else None


@dataclass(frozen=True)
class Plan:
    """All shards of a cache, in the order of their numbers."""

    shards: tuple[Shard, ...] = ()
    num_files: int = 0
    """The number of plan files; each extension adds one."""
    found: tuple[PlannedImage, ...] = ()
    """All images with the files in which they were found, in the order in which this was recorded: a later entry about
    the same file is the valid one."""

    def extension(
        self, images: Sequence[PlannedImage], bytes_per_token: int, shard_bytes: int, taken: Iterable[str] = ()
    ) -> tuple[Shard, ...]:
        """Shards for more images, in order; their numbers follow those of this plan and of the names in `taken`."""
        names = (*taken, *(shard.name for shard in self.shards))
        first = max((int(name.rpartition("-")[2]) + 1 for name in names), default=0)
        groups = cut(images, shard_bytes // bytes_per_token)
        return tuple(Shard(shard_name(first + number), group) for number, group in enumerate(groups))

    def extended(self, shards: tuple[Shard, ...], again: tuple[PlannedImage, ...] = ()) -> Plan:
        """This plan with one more plan file: new shards, and images of older shards that were found again."""
        new = tuple(image for shard in shards for image in shard.images)
        return Plan(self.shards + shards, self.num_files + 1, self.found + new + again)

    def images(self) -> Iterator[PlannedImage]:
        return (image for shard in self.shards for image in shard.images)

    def files(self) -> dict[str, tuple[str, Stamp | None]]:
        """The image key and the stamp of each file in which an image was found."""
        return {
            file: (image.key, stamp) for image in self.found for file, stamp in zip_longest(image.files, image.stamps)
        }


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def cut(images: Iterable[PlannedImage], max_tokens: int) -> list[tuple[PlannedImage, ...]]:
    """Cut images into groups of at most `max_tokens`, in order; a larger image is a group by itself."""
    groups: list[list[PlannedImage]] = []
    filled = 0
    for image in images:
        if not groups or filled + image.num_tokens > max_tokens or len(groups[-1]) == MAX_IMAGES:
            groups.append([])
            filled = 0
        groups[-1].append(image)
        filled += image.num_tokens
    return [tuple(group) for group in groups]
