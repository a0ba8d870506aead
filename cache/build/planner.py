"""What a build has to do: the images that are wanted, against those that are there and those that are planned.

Design: several workers may find at once that the plan lacks images. Each makes the same extension from the same plan;
the first to write its part wins, the others read the plan again. A worker need not hash the files that a plan names (a
hundred workers would read the whole data set a hundred times): the plan says their keys, and the bytes are compared
with the key when the image is encoded. A file whose stamp is another than when it was planned is hashed all the same,
so that an image that was edited since is not called done.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.manifest import extend_plan, read_plan
from lookonce.cache.store.plan import Plan, PlannedImage, Shard
from lookonce.cache.store.receipts import Receipt, read_receipts
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.stamps import Stamp, stamps

if TYPE_CHECKING:
    from lookonce.cache.model.pixels import ImageProcessor


def planned_images(index: ImageIndex, processor: ImageProcessor) -> list[PlannedImage]:
    """The distinct images of some records, in reading order."""
    files: dict[str, dict[str, Stamp | None]] = defaultdict(dict)
    for path, key in sorted(index.key_of.items()):
        files[key][str(path)] = index.stamp_of.get(path)
    return [
        PlannedImage(
            key, planned_tokens(processor, index.size_of.get(key)), tuple(files[key]), tuple(files[key].values())
        )
        for key in index.path_of
    ]


def planned_tokens(processor: ImageProcessor, size: tuple[int, int] | None) -> int:
    """From the header; an image that has none, or of an impossible shape, is planned as nothing and found out later."""
    try:
        return processor.num_tokens(*size) if size else 0
    except ValueError:
        return 0


@dataclass(frozen=True)
class Settled:
    """What of a cache is done, as its receipts said at one moment: others may be adding to it."""

    images: set[str]
    """Those whose features are there and, unless they are to be tried again, those known to be impossible."""
    shards: set[str]

    @classmethod
    def of(cls, folder: Path, *, retry_unread: bool = True, retry_quarantined: bool = False) -> Settled:
        return cls.by(read_receipts(folder), retry_unread=retry_unread, retry_quarantined=retry_quarantined)

    @classmethod
    def by(cls, receipts: Iterable[Receipt], *, retry_unread: bool = True, retry_quarantined: bool = False) -> Settled:
        images: set[str] = set()
        shards: set[str] = set()
        for receipt in receipts:
            shards.add(receipt.shard)
            images |= receipt.images.keys()
            for key, failure in receipt.failed.items():
                if not (retry_unread if failure.retry else retry_quarantined):
                    images.add(key)
        return cls(images, shards)


def missing_shards(
    plan: Plan,
    settled: Settled,
    images: Iterable[PlannedImage],
    fingerprint: Fingerprint,
    shard_bytes: int,
    former: Collection[str] = (),
) -> tuple[Shard, ...]:
    """Shards to add to a plan for those of `images` that no shard can give.

    A shard can give an image if it is finished, or if it can be made (`pending_shards`).
    """
    wanted = {image.key: image for image in images}
    to_come = {key for shard in pending_shards(plan, settled, wanted.keys(), former) for key in shard.keys}
    tokens_of = {image.key: image.num_tokens for image in plan.images()}  # an index made of a plan has no sizes
    new = [
        replace(image, num_tokens=image.num_tokens or tokens_of.get(key, 0))
        for key, image in wanted.items()
        if key not in settled.images and key not in to_come
    ]
    return plan.extension(new, fingerprint.bytes_per_token, shard_bytes, taken=settled.shards)


def agree_on_plan(
    folder: Path,
    images: Iterable[PlannedImage],
    fingerprint: Fingerprint,
    shard_bytes: int,
    former: Collection[str] = (),
    **retry: bool,
) -> Plan:
    """The plan of a cache, extended on disk by what these images need; `retry` as in `Settled.of`."""
    images = list(images)
    while True:
        plan = read_plan(folder)
        new = missing_shards(plan, Settled.of(folder, **retry), images, fingerprint, shard_bytes, former)
        if not new:
            return plan
        extend_plan(folder, plan, new)


def pending_shards(plan: Plan, settled: Settled, keys: Collection[str], former: Collection[str] = ()) -> list[Shard]:
    """The shards to be made: unfinished, all their images among `keys` or `former`, not all of `keys` there already.

    Those of `former`, whose files have changed, will be missing in it; where they are most, it is left alone.
    """
    keys = set(keys)
    known = keys.union(former)

    def is_pending(shard: Shard) -> bool:
        asked = keys.intersection(shard.keys)
        return 2 * len(asked) >= len(shard.keys) and not asked <= settled.images

    return [
        shard
        for shard in plan.shards
        if shard.name not in settled.shards and known.issuperset(shard.keys) and is_pending(shard)
    ]


def index_of_plan(plan: Plan, paths: Iterable[Path]) -> ImageIndex:
    """The keys of files as the plan has them, without reading one.

    Left out are files that it does not name, and those that may have changed since; `former` has the keys of these.
    """
    planned = {file: (image.key, stamp) for image in plan.images() for file, stamp in _stamped(image)}
    found = stamps(path for path in paths if str(path) in planned)
    stamp_of = {path: stamp for path, stamp in found.items() if stamp and stamp == planned[str(path)][1]}
    key_of = {path: planned[str(path)][0] for path in stamp_of}
    path_of = {key: path for path, key in reversed(key_of.items())}
    former = {planned[str(path)][0]: path for path in found if path not in stamp_of}
    return ImageIndex(
        key_of,
        {image.key: path_of[image.key] for image in plan.images() if image.key in path_of},
        stamp_of=stamp_of,
        former={key: path for key, path in former.items() if key not in path_of},
    )


def _stamped(image: PlannedImage) -> Iterable[tuple[str, Stamp | None]]:
    return itertools.zip_longest(image.files, image.stamps)
