"""Images through the tower: decoded ahead, several a forward, copied back while the next are encoded.

Design: a shard's images go through the tower in the order of their size, as many a forward as
`Tower.tokens_per_forward` allows, so a forward's images are of about one size and the GPU is full. Which images share a
forward follows from the plan alone: a shard is made of the same forwards whoever makes it, and on the same hardware has
the same bits. On a CPU each image goes alone. Three things happen at once: the images of coming forwards are decoded,
of the next shard too; the tower encodes; what it has put out is copied to pinned memory, for the writer to take from
there.

An image that can not be read or decoded is left out and the others go on. If most of a shard can not be read, the disk
is gone and not an image, and the build stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lookonce.cache.build.decode import DecodeAhead, Decoded, Request
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.plan import Shard, cut
from lookonce.cache.store.receipts import Failure, Grid
from lookonce.cache.store.shards import Packed
from lookonce.cache.store.stopwatch import Stopwatch
from lookonce.cache.store.dtypes import Storage
from lookonce.datasets.archives import by_archive
from lookonce.datasets.images import read_many
from lookonce.errors import ImageError

ON_DEVICE = 2
"""Forwards that the device has in its queue while what came before them is written and flushed."""
MAX_UNREAD = 8
"""So many images of a shard may be unreadable before the disk is suspected."""


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
        self._decoder = DecodeAhead(files, processor, tower.device)
        self._num_unread = 0
        """Images of the shard in work that could not be read."""

    def close(self) -> None:
        """End the processes that decode."""
        self._decoder.close()

    def run(self, shards: Iterable[Shard]) -> Iterator[Encoded]:
        """Encode shards one after the other, in pieces; a shard is asked for when its images may be decoded.

        Raises:
            ImageError: most images of a shard can not be read.
        """
        asked: deque[tuple[Shard, bool]] = deque()
        waiting: deque[_OnDevice] = deque()
        decoded = self._decoder.run(self._requests(shards, asked))
        while (piece := self._next(decoded)) is not None:
            waiting.append(self._launch(piece, *asked.popleft()))
            if len(waiting) > ON_DEVICE:
                yield waiting.popleft().wait()
        while waiting:
            yield waiting.popleft().wait()

    def _requests(self, shards: Iterable[Shard], asked: deque[tuple[Shard, bool]]) -> Iterator[Request]:
        """The forwards of shards; notes in `asked` which shard each is of, and whether it is its last."""
        for shard in shards:
            _, members_of = by_archive(self.files[key] for key in shard.keys)
            archived = dict(read_many(path for paths in members_of.values() for path in paths))
            ordered = sorted(shard.images, key=lambda image: (image.num_tokens, image.key))
            groups = cut(ordered, self.tower.tokens_per_forward)
            for number, group in enumerate(groups, start=1):
                asked.append((shard, number == len(groups)))
                paths = [self.files[image.key] for image in group]
                yield Request(group, {path: archived[path] for path in paths if path in archived})

    def _next(self, decoded: Iterator[Decoded]) -> Decoded | None:
        with self.stopwatch.phase("wait for images"):
            return next(decoded, None)

    def _launch(self, decoded: Decoded, shard: Shard, is_last: bool) -> _OnDevice:
        for name, seconds in decoded.seconds.items():
            self.stopwatch.add(name, seconds)
        unread = [failure.reason for failure in decoded.failed.values() if failure.retry]
        self._num_unread += len(unread)
        if unread and self._num_unread > max(len(shard.images) // 2, MAX_UNREAD):
            raise ImageError(f"most images of {shard.name} can not be read, the last because: {unread[-1]}")
        if is_last:
            self._num_unread = 0
        with self.stopwatch.phase("give to the device"):
            return _OnDevice(self, decoded, shard, is_last)


class _OnDevice:
    """A forward in the device's queue, and its results on their way back."""

    def __init__(self, encoder: Encoder, decoded: Decoded, shard: Shard, is_last: bool) -> None:
        self._encoder, self._decoded, self._shard, self._is_last = encoder, decoded, shard, is_last
        if not decoded.images:
            return
        device, stopwatch = encoder.tower.device, encoder.stopwatch
        with stopwatch.device_phase("copy in and patch", device):
            pixels = decoded.on(device)
            patches = encoder._patcher(pixels)
        self._grids = [encoder._patcher.grid_thw(image) for image in pixels]
        with stopwatch.device_phase("tower", device):
            features = encoder.tower.encode(patches, self._grids)
        with stopwatch.device_phase("pack", device), torch.inference_mode():
            norms = torch.linalg.vector_norm(features, dim=-1, dtype=torch.float32)
            peaks = features.abs().amax(dim=-1).float()
            packed = encoder.storage.pack(features)
        self._copy = HostCopy([norms, peaks, *packed], device, stopwatch)

    def wait(self) -> Encoded:
        """What has become of its images, on the CPU."""
        encoded = Encoded(self._shard, [], dict(self._decoded.failed), self._is_last)
        if not self._decoded.images:
            return encoded
        with self._encoder.stopwatch.phase("wait for the tower"):
            norms, peaks, *parts = self._copy.wait()
        merge = self._encoder.tower.merge_size**2
        counts = [t * h * w // merge for t, h, w in self._grids]
        pieces = zip(*(torch.split(part, counts) for part in (norms, peaks, *parts)), strict=True)
        for image, grid, (norm, peak, *features) in zip(self._decoded.images, self._grids, pieces, strict=True):
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

    def __init__(self, tensors: list[torch.Tensor], device: torch.device, stopwatch: Stopwatch) -> None:
        self._source = self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            stream = _copy_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), stopwatch.device_phase("copy back", device):
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


def _rounded(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values.tolist())
