"""The plan of a cache: which images go into which shard.

Design: made before the first image is encoded and never changed after, so that any number of workers, restarted any
number of times, cut the work alike. Keys are sorted and cut by size; a cache that is asked for more images gets more
shards, the ones it has stay as they are. Planned sizes come from image headers alone; nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.cache.fingerprint import FORMAT_VERSION


@dataclass(frozen=True)
class Shard:
    """A shard to be: its name and the image keys that go into it, sorted."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All shards of a cache, in the order of their numbers."""

    shards: tuple[Shard, ...] = ()

    def extended(self, size_of: Mapping[str, int], shard_bytes: int) -> Plan:
        """This plan and, after its shards, new ones for the images of `size_of` (key to planned bytes)."""
        first = len(self.shards)
        groups = cut(sorted(size_of), size_of, shard_bytes)
        added = tuple(Shard(f"shard-{first + number:05d}", group) for number, group in enumerate(groups))
        return Plan(self.shards + added)

    def to_json(self) -> dict[str, Any]:
        shards = [{"name": shard.name, "keys": list(shard.keys)} for shard in self.shards]
        return {"format_version": FORMAT_VERSION, "shards": shards}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        return cls(tuple(Shard(shard["name"], tuple(shard["keys"])) for shard in value["shards"]))


def cut(keys: Iterable[str], size_of: Mapping[str, int], limit: int) -> list[tuple[str, ...]]:
    """Cut `keys` into runs of at most `limit` bytes, in order; a key larger than that has a run of its own."""
    groups: list[list[str]] = []
    filled = 0
    for key in keys:
        if not groups or filled + size_of[key] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += size_of[key]
    return [tuple(group) for group in groups]
