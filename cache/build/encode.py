"""Run images through the tower: decoded ahead, in tower batches, copied back while the next batch is encoded.

Design: a shard's images are sorted by size and cut into tower batches of at most `Tower.tokens_per_tower_batch` tokens,
so the images of a batch have about the same size and the GPU is full. The plan alone decides which images share a
batch, so on the same hardware a shard has the same bits whichever worker builds it. Three things overlap: decoding of
the next batches, those of the next shard included; the tower; the copy of its output to pinned memory, from which it is
written.

PyTorch's DataLoader decodes; one item is all images of one tower batch, joined in one block of shared memory, which is
pinned on the way. For a GPU, worker processes decode: threads would hold Python's lock so often that the thread that
launches kernels, hundreds a tower batch, mostly waits (8B: 200 ms to launch a tower batch of 170 ms, with 8 decoding
threads). On a CPU the tower needs the cores, so images are decoded when the tower needs them, and encoded one by one.

An image that cannot be read or decoded is left out. One that cannot be *read*, because its file is missing or changed
since it was hashed, may be readable for the next build; one that cannot be *decoded* will not. If most images of a
shard cannot be read, the disk is suspected and the build stops.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lookonce.cache.format import Grid
from lookonce.cache.model.pixels import ImageProcessor, on_white
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import Failure, PlannedImage, Shard, cut
from lookonce.cache.store.shards import Stopwatch, StoredImage
from lookonce.datasets.archives import by_archive
from lookonce.datasets.images import bytes_key, decode, read_bytes, read_many
from lookonce.environment import num_cores
from lookonce.errors import BadImage, ImageError
from lookonce.signals import workers_without_signals

MAX_WORKERS = 8
MAX_ON_DEVICE = 2
"""Tower batches in the device's queue while earlier ones are written and flushed."""
MAX_UNREAD = 8
"""At most this many images of a shard may be unreadable before the disk is suspected."""


def num_workers(device: torch.device) -> int:
    """Number of decoding processes for a device; 0 decodes in this process."""
    return min(MAX_WORKERS, max(num_cores() - 1, 1)) if device.type == "cuda" else 0


@dataclass(frozen=True)
class Request:
    """The images of a tower batch."""

    images: tuple[PlannedImage, ...]
    archived: Mapping[Path, bytes | ImageError] = field(default_factory=dict)
    """Bytes that were already read from archives, by path."""


@dataclass(frozen=True)
class DecodedBatch:
    """The images of a tower batch after decoding."""

    images: tuple[PlannedImage, ...]
    """The images that could be decoded."""
    shapes: tuple[torch.Size, ...]
    """The shape of each image, `[height, width, 3]`."""
    pixels: torch.Tensor
    """All pixels, image after image, uint8."""
    failed: Mapping[str, Failure]
    """The images that could not be read or decoded, by key."""
    seconds: Mapping[str, float]
    """Time spent reading, decoding and resizing."""

    def pin_memory(self) -> DecodedBatch:
        """DataLoader calls this."""
        return replace(self, pixels=self.pixels.pin_memory())

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """Each image on a device, by one copy; from pinned memory it is asynchronous."""
        pieces = torch.split(self.pixels.to(device, non_blocking=True), [shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class _Decoder(Dataset[DecodedBatch]):
    """Decodes the images of each request, in DataLoader's processes."""

    def __init__(self, files: Mapping[str, Path], processor: ImageProcessor) -> None:
        self.files, self.processor = files, processor

    def __getitem__(self, request: Request) -> DecodedBatch:
        stopwatch = Stopwatch()
        pixels: dict[PlannedImage, torch.Tensor] = {}
        failed: dict[str, Failure] = {}
        for image in request.images:
            path = self.files[image.key]
            try:
                pixels[image] = self._decode_any(image, path, request, stopwatch)
            except ImageError as error:
                failed[image.key] = Failure(str(path), str(error), retry=not isinstance(error, BadImage))
        joined = torch.cat([piece.flatten() for piece in pixels.values()] or [torch.empty(0, dtype=torch.uint8)])
        shapes = tuple(piece.shape for piece in pixels.values())
        return DecodedBatch(tuple(pixels), shapes, joined, failed, stopwatch.seconds())

    def _decode_any(self, image: PlannedImage, path: Path, request: Request, stopwatch: Stopwatch) -> torch.Tensor:
        """Decode an image from its file, or from another file with the same bytes if that one is gone."""
        try:
            return self._decode(image, path, request.archived.get(path), stopwatch)
        except BadImage:
            raise
        except ImageError:
            for copy in map(Path, image.files):
                with contextlib.suppress(ImageError):
                    if copy != path:
                        return self._decode(image, copy, None, stopwatch)
            raise

    def _decode(
        self, image: PlannedImage, path: Path, archived: bytes | ImageError | None, stopwatch: Stopwatch
    ) -> torch.Tensor:
        with stopwatch.measure("read"):
            data = read_bytes(path) if archived is None else archived
            if isinstance(data, ImageError):
                raise data
            if bytes_key(data) != (image.variant.of if image.variant else image.key):
                raise ImageError(f"image {path} has changed since it was hashed")
        with stopwatch.measure("decode"):
            picture = decode(data, path)
            if image.variant:
                picture = image.variant.picture(on_white(picture))
        with stopwatch.measure("resize"):
            return self.processor.resized(picture, path)


class DecodeAhead:
    """Decodes the images of requests, ahead of the caller; DataLoader, which iterates over it, keeps its processes."""

    def __init__(self, files: Mapping[str, Path], processor: ImageProcessor, device: torch.device) -> None:
        """`files` maps image keys to files; `device` is where the pixels will go."""
        options: dict[str, Any] = {}
        if workers := num_workers(device):
            options = {"prefetch_factor": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        self._requests: Iterable[Request] = ()
        self._loader: DataLoader[DecodedBatch] = DataLoader(
            _Decoder(files, processor),
            sampler=self,
            batch_size=None,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            **options,
        )

    def run(self, requests: Iterable[Request]) -> Iterator[DecodedBatch]:
        """Decode requests in order; a request is drawn when a process is free for it."""
        self._requests = requests
        with workers_without_signals():  # for a signal to the process group this process ends them
            return iter(self._loader)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def close(self) -> None:
        iterator = self._loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


@dataclass(frozen=True)
class EncodedBatch:
    """The images of a tower batch after encoding, on the CPU."""

    shard: Shard
    images: list[StoredImage] = field(default_factory=list)
    failed: dict[str, Failure] = field(default_factory=dict)
    is_last: bool = True


class Encoder:
    def __init__(
        self,
        files: Mapping[str, Path],
        processor: ImageProcessor,
        tower: Tower,
        fingerprint: Fingerprint,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """`files` maps image keys to files; `fingerprint` says in which form features are stored."""
        self.files, self.processor, self.tower, self.fingerprint = files, processor, tower, fingerprint
        self.stopwatch = stopwatch or Stopwatch()
        self._patcher = processor.patcher().to(tower.device, tower.dtype)
        self._decoder = DecodeAhead(files, processor, tower.device)
        self._num_unread = 0
        """Images of the current shard that could not be read."""

    def close(self) -> None:
        self._decoder.close()

    def run(self, shards: Iterable[Shard]) -> Iterator[EncodedBatch]:
        """Encode shards, each drawn when it can be decoded; raises ImageError if most images cannot be read."""
        requested: deque[tuple[Shard, bool]] = deque()
        waiting: deque[_BatchOnDevice] = deque()
        decoded = self._decoder.run(self._requests(shards, requested))
        while True:
            with self.stopwatch.measure("wait for images"):
                batch = next(decoded, None)
            if batch is None:
                break
            waiting.append(self._launch(batch, *requested.popleft()))
            if len(waiting) > MAX_ON_DEVICE:
                yield waiting.popleft().wait()
        while waiting:
            yield waiting.popleft().wait()

    def _requests(self, shards: Iterable[Shard], requested: deque[tuple[Shard, bool]]) -> Iterator[Request]:
        """The tower batches of shards; adds to `requested` the shard of each and whether it is the shard's last."""
        for shard in shards:
            _, members_of = by_archive(self.files[key] for key in shard.keys)
            archived = dict(read_many(path for paths in members_of.values() for path in paths))
            ordered = sorted(shard.images, key=lambda image: (image.num_tokens, image.key))
            batches = cut(ordered, self.tower.tokens_per_tower_batch)
            for number, batch in enumerate(batches, start=1):
                requested.append((shard, number == len(batches)))
                paths = [self.files[image.key] for image in batch]
                yield Request(batch, {path: archived[path] for path in paths if path in archived})

    def _launch(self, decoded: DecodedBatch, shard: Shard, is_last: bool) -> _BatchOnDevice:
        for name, seconds in decoded.seconds.items():
            self.stopwatch.add(name, seconds)
        unread = [failure.reason for failure in decoded.failed.values() if failure.retry]
        self._num_unread += len(unread)
        if unread and self._num_unread > max(len(shard.images) // 2, MAX_UNREAD):
            raise ImageError(f"most images of {shard.name} cannot be read; the last one: {unread[-1]}")
        if is_last:
            self._num_unread = 0
        with self.stopwatch.measure("give to the device"):
            return _BatchOnDevice(self, decoded, shard, is_last)


class _BatchOnDevice:
    """A tower batch in the device's queue, and the copy of its output to pinned memory, on a stream of its own."""

    def __init__(self, encoder: Encoder, decoded: DecodedBatch, shard: Shard, is_last: bool) -> None:
        self._encoder, self._decoded, self._shard, self._is_last = encoder, decoded, shard, is_last
        if not decoded.images:
            return
        device, stopwatch = encoder.tower.device, encoder.stopwatch
        with stopwatch.measure_device("copy in and patch", device):
            pixels = decoded.on(device)
            patches = encoder._patcher(pixels)
        self._grids = [encoder._patcher.grid_thw(image) for image in pixels]
        with stopwatch.measure_device("tower", device):
            features = encoder.tower.encode(patches, self._grids)
        self._counts = [t * h * w // encoder.tower.merge_size**2 for t, h, w in self._grids]
        with stopwatch.measure_device("pack", device), torch.inference_mode():
            norms = torch.linalg.vector_norm(features, dim=-1, dtype=torch.float32)
            peaks = features.abs().amax(dim=-1).float()
            stored = encoder.fingerprint.storage.quantize(features)
        self._tensors = self._on_device = [norms, peaks, *stored]  # kept until they are copied
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            stream = _copy_stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), stopwatch.measure_device("copy back", device):
                self._tensors = [
                    torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                    for tensor in self._on_device
                ]
            self._copied = stream.record_event()

    def wait(self) -> EncodedBatch:
        encoded = EncodedBatch(self._shard, [], dict(self._decoded.failed), self._is_last)
        if not self._decoded.images:
            return encoded
        with self._encoder.stopwatch.measure("wait for the tower"):
            if self._copied is not None:
                self._copied.synchronize()
        self._on_device = []
        per_image = zip(*(torch.split(tensor, self._counts) for tensor in self._tensors), strict=True)
        for image, grid, (norm, peak, *features) in zip(self._decoded.images, self._grids, per_image, strict=True):
            if torch.isfinite(peak).all():
                stored = StoredImage(image.key, grid, tuple(features), _rounded(norm.mean(0)), _rounded(peak.amax(0)))
                encoded.images.append(stored)
            else:
                path = str(self._encoder.files[image.key])
                encoded.failed[image.key] = Failure(path, f"the tower's features of {path} are not finite")
        return encoded


@dataclass(frozen=True)
class ImageFeatures:
    """The features of one image as a cache would return them."""

    features: torch.Tensor
    """`[num_tokens, num_levels, hidden]`, on the CPU."""
    grid_thw: Grid

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], grid: Grid, fingerprint: Fingerprint) -> ImageFeatures:
        return cls(fingerprint.storage.dequantize(*tensors).cpu(), grid)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _rounded(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values.tolist())
