"""Image files as 8-bit pixels, decoded ahead of the tower.

Design: PyTorch's own DataLoader, an item of which is all images of one forward, already joined into one piece of shared
memory that is pinned on the way. Where there is a GPU to feed, processes decode: threads would do it as fast, but take
Python's lock so often that the thread which launches kernels, hundreds a forward, mostly waits for it (8B: 200 ms to
launch a forward of 170 ms, with 8 decoding threads). On a CPU the tower needs the cores, and images are decoded when
their turn comes.

What can not be *decoded* is told apart from what can not be *read*: a file that the disk does not give, or whose bytes
are no longer those that were hashed, may be there for the next build.
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

from lookonce.cache.model.pixels import ImageProcessor, decode
from lookonce.cache.store.plan import PlannedImage
from lookonce.cache.store.receipts import Failure
from lookonce.datasets.images import bytes_key, read_bytes
from lookonce.errors import BadImage, ImageError

MAX_WORKERS = 8


def num_workers(device: torch.device) -> int:
    """How many processes decode for a device."""
    return min(MAX_WORKERS, max(len(os.sched_getaffinity(0)) - 1, 1)) if device.type == "cuda" else 0


@dataclass(frozen=True)
class Request:
    """The images of a forward."""

    images: tuple[PlannedImage, ...]
    archived: Mapping[Path, bytes | ImageError] = field(default_factory=dict)
    """What was read from archives already."""


@dataclass(frozen=True)
class Decoded:
    """The images of a forward after decoding."""

    images: tuple[PlannedImage, ...]
    """Those that could be decoded."""
    shapes: tuple[torch.Size, ...]
    """Of each, `[height, width, 3]`."""
    pixels: torch.Tensor
    """All of them one after the other, uint8."""
    failed: Mapping[str, Failure]
    seconds: Mapping[str, float]
    """By phase."""

    def pin_memory(self) -> Decoded:
        """For DataLoader."""
        return replace(self, pixels=self.pixels.pin_memory())

    def on(self, device: torch.device) -> list[torch.Tensor]:
        """Each image on a device; from pinned memory it is one copy that nobody waits for."""
        pieces = torch.split(self.pixels.to(device, non_blocking=True), [shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class _Decoder(Dataset[Decoded]):
    """Answers each request; what DataLoader's processes run."""

    def __init__(self, files: Mapping[str, Path], processor: ImageProcessor) -> None:
        self.files, self.processor = files, processor

    def __getitem__(self, request: Request) -> Decoded:
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
        return Decoded(tuple(pixels), tuple(piece.shape for piece in pixels.values()), joined, failed, seconds)

    def _decode_any(self, image: PlannedImage, path: Path, request: Request, seconds: dict[str, float]) -> torch.Tensor:
        """The image out of its file, or of another with the same bytes if that one is gone."""
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
        self, image: PlannedImage, path: Path, found: bytes | ImageError | None, seconds: dict[str, float]
    ) -> torch.Tensor:
        times = [time.perf_counter()]
        data = read_bytes(path) if found is None else found
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
    """An iterable that can be set anew: DataLoader keeps its processes, and asks again."""

    def __init__(self) -> None:
        self.source: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.source)


class DecodeAhead:
    """Decodes the images of requests, some ahead of the caller."""

    def __init__(self, files: Mapping[str, Path], processor: ImageProcessor, device: torch.device) -> None:
        """`files` has the file of each image key; `device` is where the pixels will go."""
        options: dict[str, Any] = {}
        if workers := num_workers(device):
            options = {"prefetch_factor": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        self._requests = _Requests()
        self._loader: DataLoader[Decoded] = DataLoader(
            _Decoder(files, processor),
            sampler=self._requests,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=device.type == "cuda",
            **options,
        )

    def run(self, requests: Iterable[Request]) -> Iterator[Decoded]:
        """The answers in order; a request is asked for when there is somebody to work on it."""
        self._requests.source = requests
        return iter(self._loader)

    def close(self) -> None:
        """End the processes."""
        iterator = self._loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def _as_it_is(decoded: Any) -> Any:
    return decoded
