"""Images through the tower: decoded ahead on threads, several a forward, copied back while the next are encoded.

Design: a shard's images go through the tower in the order of their size, as many a forward as
`Tower.tokens_per_forward` allows, so a forward's images are of about one size and the GPU is full. Which images share a
forward follows from the plan alone: a shard is made of the same forwards whoever makes it, and on the same hardware has
the same bits. On a CPU each image goes alone. Three things happen at once: threads read, decode and resize the images
of coming forwards, of the next shard too; the tower encodes; what it has put out is copied to pinned memory, for the
writer to take from there.

What can not be *decoded* is told apart from what can not be *read*: both leave their image out and the others go on,
but a file that the disk does not give, or whose bytes are no longer those that were hashed, is tried again by the next
build. If most of a shard can not be read, the disk is gone and not an image, and the build stops.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lookonce.cache.pixels import ImageProcessor, decode
from lookonce.cache.plan import PlannedImage, Shard, cut
from lookonce.cache.receipts import Failure, Grid
from lookonce.cache.shards import Packed
from lookonce.cache.stopwatch import Stopwatch
from lookonce.cache.storage import Storage
from lookonce.cache.tower import Tower
from lookonce.datasets.archives import find_archive
from lookonce.datasets.images import bytes_key, read_bytes, read_many
from lookonce.errors import BadImage, ImageError

NUM_READERS = min(16, len(os.sched_getaffinity(0)) + 1)
"""Threads that decode images: Pillow releases Python's lock while it does."""
AHEAD = 3
"""Images that are decoded ahead of the tower, for each of those threads."""


@dataclass(frozen=True)
class Forward:
    """Some images of a shard that go through the tower together, being decoded."""

    shard: Shard
    images: tuple[PlannedImage, ...]
    decoded: list[Future[torch.Tensor]]
    is_last: bool
    """Of its shard."""


@dataclass(frozen=True)
class Encoded:
    """What has become of the images of a forward."""

    shard: Shard
    images: list[Packed] = field(default_factory=list)
    failed: dict[str, Failure] = field(default_factory=dict)
    is_last: bool = True
    """Of its shard."""


class Encoder:
    """Encodes the images of shards."""

    def __init__(
        self,
        files: Mapping[str, Path],
        processor: ImageProcessor,
        tower: Tower,
        storage: Storage,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """`files` has the file of each image key."""
        self.files, self.processor, self.tower, self.storage = files, processor, tower, storage
        self.stopwatch = stopwatch or Stopwatch()
        self._patcher = processor.patcher().to(tower.device, tower.dtype)
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="decode")

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def run(self, shards: Iterable[Shard]) -> Iterator[Encoded]:
        """Encode shards one after the other, in pieces; a shard is asked for when its images may be decoded.

        Raises:
            ImageError: most of a shard's images can not be read.
        """
        waiting: deque[_OnDevice] = deque()
        for forward in self._decode_ahead(shards):
            waiting.append(self._launch(forward))
            if len(waiting) > 1:
                yield waiting.popleft().wait()
        while waiting:
            yield waiting.popleft().wait()

    def _decode_ahead(self, shards: Iterable[Shard]) -> Iterator[Forward]:
        waiting: deque[Forward] = deque()
        num_waiting = 0
        for forward in (forward for shard in shards for forward in self._forwards(shard)):
            waiting.append(forward)
            num_waiting += len(forward.images)
            while len(waiting) > 1 and num_waiting > AHEAD * NUM_READERS:
                num_waiting -= len(waiting[0].images)
                yield waiting.popleft()
        yield from waiting

    def _forwards(self, shard: Shard) -> Iterator[Forward]:
        """Begin to decode a shard's images, forward by forward."""
        members = [self.files[key] for key in shard.keys if find_archive(self.files[key])]
        archived = self._threads.submit(lambda: dict(read_many(members)))
        ordered = sorted(shard.images, key=lambda image: (image.num_tokens, image.key))
        groups = cut(ordered, self.tower.tokens_per_forward)
        for number, group in enumerate(groups, start=1):
            decoded = [self._threads.submit(self._decode, image, archived) for image in group]
            yield Forward(shard, group, decoded, is_last=number == len(groups))

    def _decode(self, image: PlannedImage, archived: Future[dict[Path, bytes | ImageError]]) -> torch.Tensor:
        path = self.files[image.key]
        with self.stopwatch.phase("read"):
            found = archived.result().get(path) or read_bytes(path)
            if isinstance(found, ImageError):
                raise found
            if bytes_key(found) != image.key:
                raise ImageError(f"image {path} has changed since it was hashed")
        with self.stopwatch.phase("decode"):
            pixels = decode(found, path)
        with self.stopwatch.phase("resize"):
            return self.processor.resized(pixels, path)

    def _launch(self, forward: Forward) -> _OnDevice:
        """Give a forward to the device as soon as its images are decoded."""
        images: list[tuple[PlannedImage, torch.Tensor]] = []
        failed: dict[str, Failure] = {}
        with self.stopwatch.phase("wait for images"):
            for image, decoded in zip(forward.images, forward.decoded, strict=True):
                try:
                    images.append((image, decoded.result()))
                except ImageError as error:
                    retry = not isinstance(error, BadImage)
                    failed[image.key] = Failure(str(self.files[image.key]), str(error), retry)
        if sum(failure.retry for failure in failed.values()) > max(len(forward.images) // 2, MAX_UNREAD):
            reason = next(failure.reason for failure in failed.values() if failure.retry)
            raise ImageError(f"most images of {forward.shard.name} can not be read: {reason}")
        return _OnDevice(self, forward, images, failed)


MAX_UNREAD = 8
"""So many images of a forward may be unreadable before the disk is suspected."""


class _OnDevice:
    """A forward in the device's queue, and its results on their way back."""

    def __init__(
        self,
        encoder: Encoder,
        forward: Forward,
        images: Sequence[tuple[PlannedImage, torch.Tensor]],
        failed: dict[str, Failure],
    ) -> None:
        self._encoder, self._forward, self._failed = encoder, forward, failed
        self._images = [image for image, _ in images]
        self._grids = [encoder._patcher.grid_thw(pixels) for _, pixels in images]
        if not images:
            return
        device, stopwatch = encoder.tower.device, encoder.stopwatch
        with stopwatch.device_phase("copy in and patch", device):
            patches = torch.cat([encoder._patcher(pixels) for pixels in to_device([p for _, p in images], device)])
        with stopwatch.device_phase("tower", device):
            features = encoder.tower.encode(patches, self._grids)
        with stopwatch.device_phase("pack", device), torch.inference_mode():
            norms = torch.linalg.vector_norm(features, dim=-1, dtype=torch.float32)
            peaks = features.abs().amax(dim=-1).float()
            self._copy = HostCopy([norms, peaks, *encoder.storage.pack(features)], device)

    def wait(self) -> Encoded:
        """What has become of its images, on the CPU."""
        encoded = Encoded(self._forward.shard, [], self._failed, self._forward.is_last)
        if not self._images:
            return encoded
        with self._encoder.stopwatch.phase("wait for the tower"):
            norms, peaks, *parts = self._copy.wait()
        merge = self._encoder.tower.merge_size**2
        counts = [t * h * w // merge for t, h, w in self._grids]
        pieces = zip(*(torch.split(part, counts) for part in (norms, peaks, *parts)), strict=True)
        for image, grid, (norm, peak, *features) in zip(self._images, self._grids, pieces, strict=True):
            if torch.isfinite(peak).all():
                packed = Packed(image.key, grid, tuple(features), _rounded(norm.mean(0)), _rounded(peak.amax(0)))
                encoded.images.append(packed)
            else:
                path = str(self._encoder.files[image.key])
                encoded.failed[image.key] = Failure(path, f"the tower's features of {path} are not finite")
        return encoded


def encode_image(path: Path, processor: ImageProcessor, tower: Tower, storage: Storage) -> tuple[torch.Tensor, Grid]:
    """The features of one image as a cache would give them, `[num_tokens, num_levels, hidden]`, and its grid.

    Raises:
        ImageError: it can not be read or decoded, or its shape is not one the processor takes.
    """
    patches, grid = processor.read(path)
    stored, *scale = storage.pack(tower.encode(patches, [grid]))
    return storage.unpack(stored, scale[0] if scale else None).cpu(), grid


class HostCopy:
    """Copies tensors to pinned memory on a stream of its own, so that the device goes on meanwhile."""

    def __init__(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        self._source = self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            stream = _copy_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._tensors = [
                    torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                    for tensor in tensors
                ]
                self._done = stream.record_event()

    def wait(self) -> list[torch.Tensor]:
        if self._done is not None:
            self._done.synchronize()
        self._source = []
        return self._tensors


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def to_device(images: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Images on the device; all in one copy from pinned memory, which does not wait for the device."""
    if device.type != "cuda":
        return list(images)
    sizes = [image.numel() for image in images]
    pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    torch.cat([image.flatten() for image in images], out=pinned)
    pieces = torch.split(pinned.to(device, non_blocking=True), sizes)
    return [piece.view(image.shape) for piece, image in zip(pieces, images, strict=True)]


def _rounded(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values.tolist())
