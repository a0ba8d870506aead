"""Features from disk: `VisionCache`.

Design: one `pread` an image, straight into the tensor that is given out, and its checksum compared: a flipped bit is
an error, never a training sample. No memory map: on network filesystems page faults make it many times slower, and a
truncated file reads as zeros. Opening reads the manifest and the receipts, one small file a shard.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from lookonce.cache.fingerprint import DTYPES, Fingerprint, raw_bytes
from lookonce.cache.folder import MANIFEST, mismatch, read_manifest, read_quarantine
from lookonce.cache.names import BUILD_COMMAND
from lookonce.cache.shards import Entry, Grid, Receipt, read_receipts, receipt_path, shard_path
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing


class VisionCache:
    """The features of images by their keys.

        cache = VisionCache.open("caches/1f2e3d4c5b6a7980")
        features = cache[image_key(Path("a.jpg"))]      # [num_tokens, num_levels, hidden]

    Safe to use from several threads and from processes that were forked or that got it pickled.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, *, check: bool = True) -> None:
        """Use `VisionCache.open` or `find_cache`; `check=False` skips the checksums."""
        self._files: dict[str, int] = {}
        self.folder, self.fingerprint, self.check = folder, fingerprint, check
        self.entries: dict[str, Entry] = {}
        self.encode_seconds = 0.0
        self.size_bytes = 0
        receipts = read_receipts(folder)
        for receipt in receipts:
            _check_origin(folder, receipt, fingerprint)
            _check_size(folder, receipt.shard, receipt.size_bytes)
            for key, entry in receipt.entries.items():
                self.entries.setdefault(key, entry)
            self.encode_seconds += receipt.seconds
            self.size_bytes += receipt.size_bytes
        self.num_shards = len(receipts)
        self.quarantined = read_quarantine(folder)

    @classmethod
    def open(cls, folder: Path | str, *, check: bool = True) -> VisionCache:
        """Open a cache folder, the one with `manifest.json` in it.

        Raises:
            CacheError: it is no cache, or of a format this version does not read.
            CacheCorrupt: a shard is missing, of another size than its receipt says, or a receipt is broken.
        """
        folder = Path(folder)
        return cls(folder, read_manifest(folder), check=check)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __getitem__(self, key: str) -> torch.Tensor:
        """The features of an image, `[num_tokens, num_levels, hidden]`, in the cache's dtype, on the CPU.

        Raises:
            FeaturesMissing: the cache does not hold that image.
            CacheCorrupt: the bytes on disk are not those that were written.
        """
        entry = self._entry(key)
        shape = (entry.num_tokens, self.fingerprint.num_levels, self.fingerprint.hidden_size)
        features = torch.empty(shape, dtype=DTYPES[self.fingerprint.dtype])
        if features.nbytes != entry.size_bytes:
            raise self._corrupt(entry, key, f"are {entry.size_bytes:,} bytes by their receipt, not {features.nbytes:,}")
        self._read_into(raw_bytes(features), entry, key)
        return features

    def get_many(self, keys: Iterable[str]) -> list[torch.Tensor]:
        """The features of several images, in the order of `keys`."""
        return [self[key] for key in keys]

    def grid_thw(self, key: str) -> Grid:
        """The patch grid (t, h, w) of an image; it has t * h * w / merge_size**2 tokens."""
        return self._entry(key).grid_thw

    def _entry(self, key: str) -> Entry:
        try:
            return self.entries[key]
        except KeyError:
            reason = self.quarantined.get(key)
            why = f"it is quarantined: {reason}" if reason else f"make them with: {BUILD_COMMAND}"
            raise FeaturesMissing(f"no features of image {key} in {self.folder}; {why}") from None

    def _read_into(self, buffer: memoryview, entry: Entry, key: str) -> None:
        filled = 0
        while filled < entry.size_bytes:
            num_read = os.preadv(self._descriptor(entry.shard), [buffer[filled:]], entry.offset + filled)
            if num_read == 0:
                raise self._corrupt(entry, key, "end before they should")
            filled += num_read
        if self.check and xxhash.xxh3_64_hexdigest(buffer) != entry.xxh3_64:
            raise self._corrupt(entry, key, "do not have the checksum of their receipt")

    def _descriptor(self, shard: str) -> int:
        if shard not in self._files:
            descriptor = os.open(shard_path(self.folder, shard), os.O_RDONLY)
            if self._files.setdefault(shard, descriptor) != descriptor:  # another thread was first
                os.close(descriptor)
        return self._files[shard]

    def _corrupt(self, entry: Entry, key: str, how: str) -> CacheCorrupt:
        return CacheCorrupt(
            f"the features of image {key} in {shard_path(self.folder, entry.shard)} {how}; "
            f"delete {receipt_path(self.folder, entry.shard)} and run: {BUILD_COMMAND}"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": {}}

    def close(self) -> None:
        """Close the shard files; they are opened again when needed."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()


def find_cache(root: Path, fingerprint: Fingerprint, *, check: bool = True) -> VisionCache:
    """Open the cache below `root` that has this fingerprint.

    Raises:
        CacheMismatch: there are caches below `root`, all of other fingerprints; says in which fields they differ.
        CacheError: there is none at all.
    """
    what = f"no cache in {root.absolute()} fits this model and these pixels"
    folder = root / fingerprint.folder_name
    if (folder / MANIFEST).exists():
        found = read_manifest(folder)
        if found != fingerprint:
            raise CacheMismatch(mismatch([found], fingerprint, what))
        return VisionCache(folder, found, check=check)
    others = list(_readable_manifests(root))
    if others:
        raise CacheMismatch(mismatch(others, fingerprint, what))
    raise CacheError(f"no cache in {root.absolute()}; make it with: {BUILD_COMMAND}")


def _readable_manifests(root: Path) -> Iterator[Fingerprint]:
    for path in sorted(root.glob(f"*/{MANIFEST}")):
        with contextlib.suppress(CacheError):  # of another format version; no business of this run
            yield read_manifest(path.parent)


def _check_origin(folder: Path, receipt: Receipt, fingerprint: Fingerprint) -> None:
    if receipt.fingerprint != fingerprint.sha256:
        raise CacheCorrupt(
            f"{receipt_path(folder, receipt.shard)} belongs to another cache ({receipt.fingerprint[:16]}); "
            f"delete it and run: {BUILD_COMMAND}"
        )


def _check_size(folder: Path, shard: str, expected: int) -> None:
    path = shard_path(folder, shard)
    found = path.stat().st_size if path.exists() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found:,} bytes, its receipt says {expected:,}"
        raise CacheCorrupt(f"{path} {state}; delete {receipt_path(folder, shard)} and run: {BUILD_COMMAND}")
