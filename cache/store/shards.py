"""Shards: features on disk as plain safetensors files. ../FORMAT.md specifies them.

Design: images are appended to a shard as they leave the tower, by several threads; the header is written last, into
space reserved at the beginning of the file. So a shard of any size needs no memory and writing overlaps with encoding,
whereas safetensors' own `save_file` needs all tensors at once. Features begin at a multiple of 4,096 bytes. The
checksum of an image (xxh3, 64 bits) is computed from memory before writing, so reading detects any damage on the way to
the disk and back.

Features are written once and read hours later, often by another machine, so writes bypass the page cache where the
filesystem supports it: on the local disk of an H200 machine one file was written and flushed at 2.2 GB/s directly and
at 1.5 GB/s through the page cache. Direct writes need addresses, offsets and lengths that are multiples of 4,096, as
those of real models are (a token has 16 or 32 kB); everything else goes through the page cache.

GPU operations are timed by events that are read only when the sums are asked for: measuring causes no host-device sync.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from lookonce.cache.format import FORMAT_VERSION, Grid
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.metadata import Entry, Failure, Receipt, has_receipt, receipt_path, to_text, write_receipt
from lookonce.files import TEMPORARY_MARK, flush, follow_umask, temporary_name, write_text

if TYPE_CHECKING:
    import torch


ALIGNMENT = 4096
SHARDS = "shards"
FORMAT_NAME = "lookonce-features"
HEADER_BYTES_PER_TENSOR = 320
"""An upper bound: a key, a dtype, three sizes, two offsets of up to 15 digits, and a grid."""
NUM_WRITERS = 4
MAX_UNWRITTEN = 2
"""At most this many tower batches wait for the disk."""


class DirectFile:
    """A new file that any number of threads may write at any offset."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Create `path`; raises OSError if the file exists, or cannot be created."""
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct: int | None = None
        if direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # the filesystem does not support it
                self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)

    def write(self, content: memoryview, offset: int) -> None:
        """Write all of `content`; returns when it is on the disk or in the page cache."""
        if self._direct is not None and _is_aligned(content, offset):
            try:
                return write_all(self._direct, content, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: this filesystem needs an alignment of more than 4,096
                    raise
        write_all(self.descriptor, content, offset)

    def flush(self) -> None:
        os.fsync(self.descriptor)

    def close(self) -> None:
        for descriptor in (self.descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """Call `os.pwrite` until all is written: one call writes at most 2 GiB."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def _is_aligned(content: memoryview, offset: int) -> bool:
    address = np.frombuffer(content, np.uint8).ctypes.data if content else 0
    return (offset | len(content) | address) % ALIGNMENT == 0


class Stopwatch:
    """Sums up seconds by operation; may be used from several threads."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    @contextlib.contextmanager
    def measure_device(self, name: str, device: torch.device) -> Iterator[None]:
        """Measure what a block launches on the device's current stream."""
        if device.type != "cuda":
            with self.measure(name):
                yield
            return
        import torch

        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        yield
        end.record()
        with self._lock:
            self._events.append((name, begin, end))

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Seconds of each operation so far; waits for the device."""
        with self._lock:
            events, self._events = self._events, []
        for name, begin, end in events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1000)
        return dict(self._seconds)


@dataclass(frozen=True)
class StoredImage:
    """The features of one image in the form in which they are stored."""

    key: str
    grid_thw: Grid
    tensors: tuple[torch.Tensor, ...]
    """On the CPU: features `[num_tokens, num_levels, hidden]`, and scales if the dtype has them."""
    norms: tuple[float, ...]
    peaks: tuple[float, ...]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class ShardWriter:
    """Writes one shard; use it as a context manager, which removes a shard that was not committed.

    Raises:
        OSError: writing failed.
    """

    def __init__(
        self, folder: Path, name: str, fingerprint: Fingerprint, max_images: int, stopwatch: Stopwatch | None = None
    ) -> None:
        self.folder, self.name, self.fingerprint = folder, name, fingerprint
        self.failed: dict[str, Failure] = {}
        self._stopwatch = stopwatch or Stopwatch()
        self._entries: dict[str, Entry] = {}
        self._started = time.time()
        num_tensors = max_images * len(fingerprint.tensors)
        self._header_bytes = ALIGNMENT * (1 + math.ceil(num_tensors * HEADER_BYTES_PER_TENSOR / ALIGNMENT))
        self._end = self._header_bytes
        path = shard_path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_name(path)
        self._file = DirectFile(self._temporary)
        self._threads = ThreadPoolExecutor(NUM_WRITERS)
        self._unwritten: deque[list[Future[None]]] = deque()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def add(self, images: Sequence[StoredImage]) -> None:
        """Append images, whose tensors must not change; waits until at most `MAX_UNWRITTEN` calls wait for the disk."""
        writes = []
        for image in images:
            writes.append(self._threads.submit(self._write, image, self._end))
            self._end += image.size_bytes
        self._unwritten.append(writes)
        with self._stopwatch.measure("wait for the disk"):
            self.wait(MAX_UNWRITTEN)

    def wait(self, at_most: int = 0) -> None:
        """Wait until the images of all calls of `add`, but for the last `at_most`, are written."""
        while len(self._unwritten) > at_most:
            for write in self._unwritten.popleft():
                write.result()  # raises if the write failed

    def commit(self) -> bool:
        """Finish the shard and write its receipt; False if another worker finished it meanwhile."""
        self.wait()
        header = self._header()
        write_all(self._file.descriptor, memoryview(header), 0)
        follow_umask(self._temporary)
        self._file.flush()
        if has_receipt(self.folder, self.name):
            return False
        path, receipt = shard_path(self.folder, self.name), self._receipt(header)
        os.replace(self._temporary, path)
        flush(path.parent)
        try:
            if write_receipt(self.folder, receipt):
                return True
        except OSError:
            if not has_receipt(self.folder, self.name) and self._is_ours(path):
                path.unlink(missing_ok=True)  # no space for the receipt: the shard would only take up disk
            raise
        if self._is_ours(path):
            # Another worker wrote its receipt after the check above, and this file replaced its shard.
            write_text(receipt_path(self.folder, self.name), to_text(receipt))
        return False

    def _is_ours(self, path: Path) -> bool:
        """Whether the file at `path` is the one that this writer wrote."""
        return path.exists() and os.stat(path).st_ino == os.fstat(self._file.descriptor).st_ino

    def _write(self, image: StoredImage, offset: int) -> None:
        digest = xxhash.xxh3_64()
        start = offset
        with self._stopwatch.measure("write"):
            for tensor in image.tensors:
                content = raw_bytes(tensor)
                digest.update(content)
                self._file.write(content, offset)
                offset += len(content)
        self._entries[image.key] = Entry(
            offset=start,
            size_bytes=image.size_bytes,
            num_tokens=len(image.tensors[0]),
            grid_thw=image.grid_thw,
            xxh3_64=digest.hexdigest(),
            norms=image.norms,
            peaks=image.peaks,
        )

    def _header(self) -> bytes:
        """A safetensors header: the length of the JSON, then the JSON, padded with blanks."""
        metadata = {
            "format": FORMAT_NAME,
            "format_version": str(FORMAT_VERSION),
            "fingerprint": self.fingerprint.sha256,
            "grid_thw": json.dumps({key: list(entry.grid_thw) for key, entry in sorted(self._entries.items())}),
        }
        in_order = dict(sorted(self._entries.items(), key=lambda item: item[1].offset))
        tensors = described(in_order, self._header_bytes, self.fingerprint)
        text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
        size = self._header_bytes - 8
        assert len(text) <= size, "HEADER_BYTES_PER_TENSOR is too small"
        return size.to_bytes(8, "little") + text.ljust(size)

    def _receipt(self, header: bytes) -> Receipt:
        return Receipt(
            shard=self.name,
            fingerprint=self.fingerprint.sha256,
            size_bytes=self._end,
            header_bytes=self._header_bytes,
            header_xxh3_64=xxhash.xxh3_64_hexdigest(header),
            host=socket.gethostname(),
            finished=round(time.time(), 3),
            seconds=round(time.time() - self._started, 3),
            images={key: self._entries[key] for key in sorted(self._entries)},
            failed=dict(sorted(self.failed.items())),
        )


def described(images: Mapping[str, Entry], header_bytes: int, fingerprint: Fingerprint) -> dict[str, Any]:
    """What the header of a shard says of the tensors of its images, by their names."""
    tensors = {}
    for key, entry in images.items():
        begin = entry.offset - header_bytes
        for tensor in fingerprint.tensors:
            end = begin + entry.num_tokens * tensor.bytes_per_token
            shape = [entry.num_tokens, *tensor.of_token]
            tensors[key + tensor.suffix] = {"dtype": tensor.code, "shape": shape, "data_offsets": [begin, end]}
            begin = end
    return tensors


def shard_path(folder: Path, name: str) -> Path:
    return folder / SHARDS / f"{name}.safetensors"


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what killed writers of a shard left; only the holder of its claim may call this."""
    for leftover in shard_path(folder, name).parent.glob(f"{name}.*{TEMPORARY_MARK}*"):
        leftover.unlink(missing_ok=True)
