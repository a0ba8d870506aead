"""The plan of a cache: which images go into which shard.

Design: made before the first image is encoded and never changed after, so that any number of workers, restarted any
number of times, cut the work alike. Images are cut by size in the order in which they are read best; a cache that is
asked for more images gets more shards, the ones it has stay as they are. For each image the plan keeps the number of
tokens, from the image's header, and the files it was found in, so that a worker needs to hash nothing before it begins.
The stamps of those
files tell it which to doubt. The cost is about 150 bytes an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lookonce.datasets.stamps import Stamp

MAX_IMAGES = 16_384
"""In a shard, whatever their size: keeps a shard's header far below safetensors' limit of 100 MB."""


@dataclass(frozen=True)
class PlannedImage:
    """An image to be encoded."""

    key: str
    num_tokens: int
    """From its header; 0 if it has none."""
    files: tuple[str, ...]
    """Where it was found; its bytes are checked against the key when they are read."""
    stamps: tuple[Stamp | None, ...] = ()
    """Of each file, before it was hashed; none if that is not known."""


@dataclass(frozen=True)
class Shard:
    """A shard to be: its name and what goes into it."""

    name: str
    images: tuple[PlannedImage, ...]

    @property
    def keys(self) -> list[str]:
        return [image.key for image in self.images]

    @property
    def num_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "keys": self.keys,
            "num_tokens": [image.num_tokens for image in self.images],
            "files": [list(image.files) for image in self.images],
            "stamps": [list(image.stamps) for image in self.images],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Shard:
        keys, files = value["keys"], map(tuple, value["files"])
        stamps = (tuple(stamp and tuple(stamp) for stamp in of) for of in value.get("stamps", [()] * len(keys)))
        columns = zip(keys, value["num_tokens"], files, stamps, strict=True)
        return cls(value["name"], tuple(PlannedImage(*column) for column in columns))


@dataclass(frozen=True)
class Plan:
    """All shards of a cache, in the order of their numbers."""

    shards: tuple[Shard, ...] = ()
    num_parts: int = 0
    """Files that it is kept in; each further extension is one more."""

    def extension(
        self, images: Sequence[PlannedImage], bytes_per_token: int, shard_bytes: int, taken: Iterable[str] = ()
    ) -> tuple[Shard, ...]:
        """Shards for further images, in their order, with names after those of this plan and those that are `taken`."""
        names = (*taken, *(shard.name for shard in self.shards))
        first = max((int(name.rpartition("-")[2]) + 1 for name in names), default=0)
        groups = cut(images, shard_bytes // bytes_per_token)
        return tuple(Shard(shard_name(first + number), group) for number, group in enumerate(groups))

    def images(self) -> Iterator[PlannedImage]:
        return (image for shard in self.shards for image in shard.images)


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def cut(images: Iterable[PlannedImage], max_tokens: int) -> list[tuple[PlannedImage, ...]]:
    """Cut images into runs of at most `max_tokens`, in order; one larger than that has a run of its own."""
    groups: list[list[PlannedImage]] = []
    filled = 0
    for image in images:
        if not groups or filled + image.num_tokens > max_tokens or len(groups[-1]) == MAX_IMAGES:
            groups.append([])
            filled = 0
        groups[-1].append(image)
        filled += image.num_tokens
    return [tuple(group) for group in groups]
