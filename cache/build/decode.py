"""Decode image files to 8-bit pixels, ahead of the tower.

Design: PyTorch's DataLoader; one item is all images of one tower batch, joined in one block of shared memory, which is
pinned on the way. For a GPU, worker processes decode. Threads would be as fast, but would hold Python's lock so often
that the thread that launches kernels, hundreds a tower batch, mostly waits (8B: 200 ms to launch a tower batch of
170 ms, with 8 decoding threads). On a CPU the tower needs the cores, so images are decoded when the tower needs them.

Images that cannot be *decoded* are distinguished from those that cannot be *read*: a file that is missing, or that
changed since it was hashed, may be readable for the next build.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.plan import PlannedImage
from lookonce.cache.store.receipts import Failure
from lookonce.datasets.images import bytes_key, decode, read_bytes
from lookonce.errors import BadImage, ImageError

MAX_WORKERS = 8


def num_workers(device: torch.device) -> int:
    """Number of decoding processes for a device; 0 decodes in this process."""
    return min(MAX_WORKERS, max(len(os.sched_getaffinity(0)) - 1, 1)) if device.type == "cuda" else 0


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
        seconds: dict[str, float] = defaultdict(float)
        pixels: dict[PlannedImage, torch.Tensor] = {}
        failed: dict[str, Failure] = {}
        for image in request.images:
            path = self.files[image.key]
            try:
                pixels[image] = self._decode_any(image, path, request, seconds)
            except ImageError as error:
                failed[image.key] = Failure(str(path), str(error), retry=not isinstance(error, BadImage))
        joined = torch.cat([piece.flatten() for piece in pixels.values()] or [torch.empty(0, dtype=torch.uint8)])
        return DecodedBatch(tuple(pixels), tuple(piece.shape for piece in pixels.values()), joined, failed, seconds)

    def _decode_any(self, image: PlannedImage, path: Path, request: Request, seconds: dict[str, float]) -> torch.Tensor:
        """Decode an image from its file, or from another file with the same bytes if that one is gone."""
        try:
            return self._decode(image, path, request.archived.get(path), seconds)
        except BadImage:
            raise
        except ImageError:
            for other in map(Path, image.files):
                with contextlib.suppress(ImageError):
                    if other != path:
                        return self._decode(image, other, None, seconds)
            raise

    def _decode(
        self, image: PlannedImage, path: Path, archived: bytes | ImageError | None, seconds: dict[str, float]
    ) -> torch.Tensor:
        times = [time.perf_counter()]
        data = read_bytes(path) if archived is None else archived
        if isinstance(data, ImageError):
            raise data
        if bytes_key(data) != image.key:
            raise ImageError(f"image {path} has changed since it was hashed")
        times.append(time.perf_counter())
        picture = decode(data, path)
        times.append(time.perf_counter())
        resized = self.processor.resized(picture, path)
        times.append(time.perf_counter())
        for name, begin, end in zip(("read", "decode", "resize"), times, times[1:], strict=False):
            seconds[name] += end - begin
        return resized


class _Requests:
    """An iterable whose source can be replaced, so that DataLoader keeps its processes between shards."""

    def __init__(self) -> None:
        self.source: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.source)


class DecodeAhead:
    """Decodes the images of requests, ahead of the caller."""

    def __init__(self, files: Mapping[str, Path], processor: ImageProcessor, device: torch.device) -> None:
        """`files` maps image keys to files; `device` is where the pixels will go."""
        options: dict[str, Any] = {}
        if workers := num_workers(device):
            options = {"prefetch_factor": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        self._requests = _Requests()
        self._loader: DataLoader[DecodedBatch] = DataLoader(
            _Decoder(files, processor),
            sampler=self._requests,
            batch_size=None,
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=device.type == "cuda",
            **options,
        )

    def run(self, requests: Iterable[Request]) -> Iterator[DecodedBatch]:
        """Decode requests in order; a request is drawn when a process is free for it."""
        self._requests.source = requests
        return iter(self._loader)

    def close(self) -> None:
        """Stop the decoding processes."""
        iterator = self._loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def _unchanged(decoded: Any) -> Any:
    return decoded
