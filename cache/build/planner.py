"""What a build has to do: compare the images of a run with those that are stored and those that are planned.

Design: several workers may find at once that the plan lacks images. Each makes the same extension from the same plan;
the first to write its file wins, the others read the plan again. A worker does not hash files that the plan names (a
hundred workers would read the whole dataset a hundred times): the plan has their keys, and the bytes are compared with
the key when the image is encoded. A file whose stamp has changed since it was planned is hashed again, so that an
edited image does not count as done.
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
from lookonce.datasets.images import ImageIndex, Stamp, is_gone, stamps

if TYPE_CHECKING:
    from lookonce.cache.model.pixels import ImageProcessor


def planned_images(index: ImageIndex, processor: ImageProcessor) -> list[PlannedImage]:
    """The distinct images of an index, in reading order."""
    files: dict[str, dict[str, Stamp | None]] = defaultdict(dict)
    for path, key in sorted(index.key_of.items()):
        files[key][str(path)] = index.stamp_of.get(path)
    return [
        PlannedImage(
            key,
            planned_tokens(processor, index.size_of.get(key)),
            tuple(files[key]),
            tuple(files[key].values()),
            key in index.transparent,
        )
        for key in index.path_of
    ]


def planned_tokens(processor: ImageProcessor, size: tuple[int, int] | None) -> int:
    """The tokens of an image by its header; 0 if it has none or an impossible shape, which encoding will report."""
    try:
        return processor.num_tokens(*size) if size else 0
    except ValueError:
        return 0


@dataclass(frozen=True)
class Finished:
    """What is finished in a cache, by its receipts at one moment; other workers may be adding to it."""

    images: set[str]
    """Keys of stored images and of those that failed, except for failures that are to be retried."""
    shards: set[str]
    """Names of the shards with a receipt."""

    @classmethod
    def read(cls, folder: Path, *, retry_unread: bool = True, retry_quarantined: bool = False) -> Finished:
        return cls.from_receipts(read_receipts(folder), retry_unread=retry_unread, retry_quarantined=retry_quarantined)

    @classmethod
    def from_receipts(
        cls, receipts: Iterable[Receipt], *, retry_unread: bool = True, retry_quarantined: bool = False
    ) -> Finished:
        images: set[str] = set()
        shards: set[str] = set()
        for receipt in receipts:
            shards.add(receipt.shard)
            images |= receipt.images.keys()
            for key, failure in receipt.failed.items():
                if not (retry_unread if failure.retry else retry_quarantined):
                    images.add(key)
        return cls(images, shards)


def new_shards(
    plan: Plan,
    finished: Finished,
    images: Iterable[PlannedImage],
    fingerprint: Fingerprint,
    shard_bytes: int,
    former: Collection[str] = (),
) -> tuple[Shard, ...]:
    """Shards to add to a plan for those of `images` that are neither finished nor in a pending shard.

    `former` are the keys that changed files had when they were planned. Images with a transparent colour that version
    0.2 has planned are planned again: it encoded the colour as it is in the file.
    """
    wanted = {image.key: image for image in images}
    pending = {key for shard in pending_shards(plan, finished, wanted.keys(), former) for key in shard.keys}
    tokens_of = {image.key: image.num_tokens for image in plan.images()}  # `index_from_plan` has no image sizes
    painted = {image.key for image in plan.images() if image.is_transparent}
    new = [
        replace(image, num_tokens=image.num_tokens or tokens_of.get(key, 0))
        for key, image in wanted.items()
        if (image.is_transparent and key not in painted) or not (key in finished.images or key in pending)
    ]
    return plan.extension(new, fingerprint.bytes_per_token, shard_bytes, taken=finished.shards)


def ensure_plan(
    folder: Path,
    images: Iterable[PlannedImage],
    fingerprint: Fingerprint,
    shard_bytes: int,
    former: Collection[str] = (),
    **retry: bool,
) -> Plan:
    """The plan of a cache, first extended on disk so that it covers these images; `retry` as in `Finished.read`."""
    images = list(images)
    while True:
        plan = read_plan(folder)
        new = new_shards(plan, Finished.read(folder, **retry), images, fingerprint, shard_bytes, former)
        again = found_again(plan, new, images)
        if not new and not again:
            return plan
        extend_plan(folder, plan, new, again)


def found_again(plan: Plan, new: Iterable[Shard], images: Iterable[PlannedImage]) -> list[PlannedImage]:
    """Those of `images` with files, or stamps of files, that neither `plan` nor its `new` shards have.

    A stamp that is not known yet is no news about a file.
    """
    known = plan.extended(tuple(new)).files()

    def is_news(image: PlannedImage, file: str, stamp: Stamp | None) -> bool:
        key, recorded = known.get(file, ("", None))
        return key != image.key or stamp not in (None, recorded)

    again = []
    for image in images:
        news = [(file, stamp) for file, stamp in _stamped(image) if is_news(image, file, stamp)]
        if news:
            files, stamps = zip(*news, strict=True)
            again.append(replace(image, files=files, stamps=stamps))
    return again


def pending_shards(plan: Plan, finished: Finished, keys: Collection[str], former: Collection[str] = ()) -> list[Shard]:
    """The shards to build: unfinished, all their images among `keys` or `former`, and some of `keys` not stored yet.

    Images of `former`, whose files have changed, will be missing in the shard; where they are most, it is not built.
    """
    keys = set(keys)
    known = keys.union(former)

    def is_pending(shard: Shard) -> bool:
        wanted = keys.intersection(shard.keys)
        again = {image.key for image in shard.images if image.is_transparent}  # an older shard may have them too
        return 2 * len(wanted) >= len(shard.keys) and not wanted <= finished.images - again

    return [
        shard
        for shard in plan.shards
        if shard.name not in finished.shards and known.issuperset(shard.keys) and is_pending(shard)
    ]


def index_from_plan(plan: Plan, paths: Iterable[Path], *, without_files: bool = False) -> ImageIndex:
    """The image keys of files by the plan, without reading the files.

    Files that the plan lacks, or that may have changed since, are left out; `former` has the planned keys of these.
    `without_files`: a file that does not exist any more has its planned key, since training needs features only.
    """
    planned = plan.files()
    found = stamps(path for path in paths if str(path) in planned)
    stamp_of = {path: stamp for path, stamp in found.items() if stamp and stamp == planned[str(path)][1]}
    gone = {path for path, stamp in found.items() if stamp is None and is_gone(path)} if without_files else set()
    key_of = {path: planned[str(path)][0] for path in found if path in stamp_of or path in gone}
    path_of = {key: path for path, key in reversed(key_of.items())}
    former = {planned[str(path)][0]: path for path in found if path not in key_of}
    return ImageIndex(
        key_of,
        {image.key: path_of[image.key] for image in plan.images() if image.key in path_of},
        stamp_of=stamp_of,
        former={key: path for key, path in former.items() if key not in path_of},
    )


def _stamped(image: PlannedImage) -> Iterable[tuple[str, Stamp | None]]:
    return itertools.zip_longest(image.files, image.stamps)
