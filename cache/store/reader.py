"""Features from disk: `VisionCache`.

Design: one `pread` per image, straight into the memory that is returned (pinned, if it goes to a GPU), and a checksum:
a flipped bit is an error, never a training sample. `get_many` reads on several threads. Features are not
memory-mapped: on network filesystems page faults make that many times slower, and a truncated file reads as zeros.
Opening reads the manifest and the index, or the receipts, and lists the sizes of the shards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from lookonce.cache.constants import BUILD_COMMAND, PARSE_ERRORS, REPAIR_COMMAND, Grid
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.index import Index, file_stats
from lookonce.cache.store.manifest import MANIFEST, mismatch_message, read_manifest, read_plan
from lookonce.cache.store.receipts import Entry, Failure
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing, explain_os_error
from lookonce.files import read_json
from lookonce.text import located
from lookonce.threads import NUM_THREADS

if TYPE_CHECKING:
    import torch

NUM_OPEN = 128
"""The most shard files that are kept open, far below the 1,024 that many systems allow a process."""


class VisionCache:
    """The features of images by their keys.

        cache = VisionCache.open("caches/1f2e3d4c5b6a7980")
        features = cache[image_key(Path("a.jpg"))]      # [num_tokens, num_levels, hidden]
        several = cache.get_many(keys, pin=True)        # read in parallel, ready for .to("cuda", non_blocking=True)

    Safe to use from several threads, after a fork, and pickled to other processes.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, *, check: bool = True) -> None:
        """Use `VisionCache.open` or `find_cache`; `check=False` skips the checksums."""
        self._connect()
        self.folder, self.fingerprint, self.check = folder, fingerprint, check
        self.index = Index.open(folder, fingerprint.sha256)
        _check_sizes(folder, self.index)
        self._bytes_of = dict(zip(self.index.shards, self.index.columns["shard_bytes"].tolist(), strict=True))

    def _connect(self) -> None:
        self._open = lru_cache(NUM_OPEN)(_ShardFile)
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    @classmethod
    def open(cls, folder: Path | str, *, check: bool = True) -> VisionCache:
        """Open a cache folder, the one with `manifest.json` in it.

        Raises:
            CacheError: the folder is not a cache, or has a format version that this program does not read.
            CacheCorrupt: a shard is missing or has not the size in its receipt, or a receipt is damaged.
        """
        folder = Path(folder)
        return cls(folder, read_manifest(folder), check=check)

    @property
    def num_shards(self) -> int:
        return len(self.index.shards)

    @property
    def size_bytes(self) -> int:
        """The bytes of all shards."""
        return int(self.index.columns["shard_bytes"].sum())

    @property
    def encode_seconds(self) -> float:
        """Seconds that building the shards took, summed over all workers."""
        return float(self.index.columns["shard_seconds"].sum())

    @property
    def failed(self) -> dict[str, Failure]:
        """The images that could not be encoded, each with its reason, by image key."""
        return self.index.failed

    def keys(self) -> Iterator[str]:
        """The keys of all images, sorted."""
        return self.index.keys()

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, key: str) -> bool:
        return self.index.find(key) is not None

    def __getitem__(self, key: str) -> torch.Tensor:
        """The features of an image, `[num_tokens, num_levels, hidden]`, in the tower's dtype, on the CPU.

        Raises:
            FeaturesMissing: the cache does not have the image.
            CacheCorrupt: the bytes on disk are damaged.
        """
        return self._read(key, pin=False)

    def get_many(self, keys: Iterable[str], *, pin: bool = False) -> list[torch.Tensor]:
        """The features of several images, in the order of `keys`, read in parallel.

        `pin` reads into page-locked memory, from which copies to a GPU are asynchronous; without a GPU it does nothing.
        """
        if self._threads is None or self._process != os.getpid():  # a forked process has the pool but not its threads
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="features")
            self._process = os.getpid()
        return list(self._threads.map(lambda key: self._read(key, pin), keys))

    def grid_thw(self, key: str) -> Grid:
        """The patch grid (t, h, w) of an image; it has t * h * w / merge_size**2 tokens."""
        return self.entry(key)[1].grid_thw

    def entry(self, key: str) -> tuple[str, Entry]:
        """The shard of an image, and its entry there.

        Raises:
            FeaturesMissing: the cache does not have the image.
        """
        row = self.index.find(key)
        if row is None:
            failure = self.failed.get(key)
            why = f"it is quarantined: {failure.reason}" if failure else f"build the cache with: {BUILD_COMMAND}"
            raise FeaturesMissing(f"no features of image {key} in {self.folder}; {why}")
        return self.index.entry(row)

    def _read(self, key: str, pin: bool) -> torch.Tensor:
        import torch

        pin = pin and torch.cuda.is_available()
        storage, (features, *others) = self.fingerprint.storage, self._tensors(key, pin)
        if not storage.is_scaled:
            return features
        dequantized = storage.dequantize(features, others[0])
        return dequantized.pin_memory() if pin else dequantized

    def _tensors(self, key: str, pin: bool) -> list[torch.Tensor]:
        """The tensors of an image as they are stored."""
        import torch

        shard, entry = self.entry(key)
        expected = entry.num_tokens * self.fingerprint.bytes_per_token
        if expected != entry.size_bytes:
            raise self._corrupt(shard, key, f"have {entry.size_bytes:,} bytes in the receipt, expected {expected:,}")
        if entry.offset + entry.size_bytes > self._bytes_of[shard]:  # before memory is taken for them
            raise self._corrupt(shard, key, "are truncated")
        content = torch.empty(entry.size_bytes, dtype=torch.uint8, pin_memory=pin)
        buffer = raw_bytes(content)
        self._fill(buffer, shard, entry.offset, key)
        if self.check and xxhash.xxh3_64_hexdigest(buffer) != entry.xxh3_64:
            raise self._corrupt(shard, key, "do not have the checksum in the receipt")
        stored = self.fingerprint.tensors
        parts = torch.split(content, [entry.num_tokens * tensor.bytes_per_token for tensor in stored])
        return [
            part.view(tensor.dtype).view(entry.num_tokens, *tensor.of_token)
            for part, tensor in zip(parts, stored, strict=True)
        ]

    def _fill(self, buffer: memoryview, shard: str, offset: int, key: str) -> None:
        """Read bytes of an image, from `offset` in its shard."""
        filled = 0
        try:
            file = self._open(shard_path(self.folder, shard))
            while filled < len(buffer):
                num_read = os.preadv(file.descriptor, [buffer[filled:]], offset + filled)
                if num_read == 0:
                    raise self._corrupt(shard, key, "are truncated")
                filled += num_read
        except PermissionError as error:
            raise CacheError(explain_os_error(error)) from None
        except OSError as error:
            raise self._corrupt(shard, key, f"cannot be read ({error.strerror})") from None

    def _corrupt(self, shard: str, key: str, how: str) -> CacheCorrupt:
        return CacheCorrupt(
            f"the features of image {self._named(key)} in {shard_path(self.folder, shard)} {how}; run: {REPAIR_COMMAND}"
        )

    def _named(self, key: str) -> str:
        """An image key for a message, with a file that has the image by the plan."""
        with contextlib.suppress(CacheError, OSError, *PARSE_ERRORS):  # a damaged plan must not hide the message
            for image in read_plan(self.folder).images():
                if image.key == key and image.files:
                    return f"{key} ({image.files[0]})"
        return key

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_threads", "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._connect()

    def close(self) -> None:
        """Close the shard files; they are opened again when needed."""
        if self._threads and self._process == os.getpid():
            self._threads.shutdown()
        self._connect()


class _ShardFile:
    """A shard file that stays open while there are references to this, so evicting it does not disturb a reader."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        with contextlib.suppress(AttributeError):  # the file could not be opened
            close(self.descriptor)


def find_cache(root: Path, fingerprint: Fingerprint, *, check: bool = True) -> VisionCache:
    """Open the cache with this fingerprint below `root`.

    Raises:
        CacheMismatch: all caches below `root` have other fingerprints; the message names the fields that differ.
        CacheError: `root` has no caches.
    """
    what = f"no cache in {located(root)} fits this model and these pixels"
    folder = root / fingerprint.folder_name
    if (folder / MANIFEST).exists():
        found = read_manifest(folder)
        if found != fingerprint:
            raise CacheMismatch(mismatch_message([found], fingerprint, what))
        return VisionCache(folder, found, check=check)
    others = list(_readable_manifests(root))
    if others:
        raise CacheMismatch(mismatch_message(others, fingerprint, what))
    raise CacheError(f"no cache in {located(root)}; build it with: {BUILD_COMMAND}")


def _readable_manifests(root: Path) -> Iterator[Fingerprint]:
    """The fingerprints of all caches below `root` with a readable manifest, whatever its format version."""
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        with contextlib.suppress(OSError, *PARSE_ERRORS):
            yield Fingerprint.from_json(read_json(path)["fingerprint"])


def _check_sizes(folder: Path, index: Index) -> None:
    """Compare the size of each shard with its receipt: lists one folder and opens no shard."""
    found = file_stats(folder / SHARDS, ".safetensors")
    for shard, expected in zip(index.shards, index.columns["shard_bytes"].tolist(), strict=True):
        size = found[shard].st_size if shard in found else None
        if size != expected:
            state = "is missing" if size is None else f"has {size:,} bytes, expected {expected:,} (from its receipt)"
            raise CacheCorrupt(f"{shard_path(folder, shard)} {state}; run: {REPAIR_COMMAND}")
