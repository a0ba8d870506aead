"""Small caches and parts of caches that several test files use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import xxhash

from lookonce.cache.format import SCALE_SUFFIX, STORAGE, Grid
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.metadata import Failure, Receipt, read_receipt
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import ShardWriter, StoredImage, shard_path
from lookonce.files import write_json


def flip(path: Path, at: int = -1, bit: int = 0) -> None:
    """Flip a bit of a file, by default of its last byte."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << bit]))


def features_in(cache: VisionCache | Path) -> dict[str, bytes]:
    """All features of a cache, with checksums compared."""
    cache = cache if isinstance(cache, VisionCache) else VisionCache.open(cache)
    return {key: bytes(raw_bytes(cache[key])) for key in cache.keys()}  # noqa: SIM118


def write_manifest(folder: Path, fingerprint: Fingerprint) -> None:
    version, value = fingerprint.format_version, fingerprint.to_json()
    manifest = {"format_version": version, "fingerprint": value, "sha256": fingerprint.sha256}
    write_json(folder / "manifest.json", manifest)


class SmallCache:
    """A cache of two shards with three images each."""

    fingerprint = Fingerprint(
        format_version=2,
        tower_sha256="0" * 64,
        tower_config={"out_hidden_size": 8},
        image_processor={"backend": "pil", "min_pixels": 4096, "max_pixels": 25_600},
        num_levels=4,
        dtype="float32",
    )
    keys = [sha256(bytes([number])).hexdigest() for number in range(6)]
    images_per_shard = 3

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.grids = {key: (1, 2, 2 * (4 + number)) for number, key in enumerate(self.keys)}
        self.features = {
            key: torch.arange(32.0 * (4 + number)).view(-1, 4, 8) + number for number, key in enumerate(self.keys)
        }
        self.as_bytes = {key: tensor.numpy().tobytes() for key, tensor in self.features.items()}
        self.write_manifest(folder)
        for number in range(2):
            keys = self.keys[number * self.images_per_shard :][: self.images_per_shard]
            self.write_shard(folder, number, {key: self.features[key] for key in keys})

    def write_manifest(self, folder: Path, fingerprint: Fingerprint | None = None) -> None:
        write_manifest(folder, fingerprint or self.fingerprint)

    def write_shard(
        self,
        folder: Path,
        number: int,
        features: dict[str, torch.Tensor],
        fingerprint: Fingerprint | None = None,
        failed: dict[str, Failure] | None = None,
    ) -> None:
        fingerprint = fingerprint or self.fingerprint
        with ShardWriter(folder, f"shard-{number:05d}", fingerprint, len(features)) as writer:
            stored = {key: fingerprint.storage.quantize(item) for key, item in features.items()}
            writer.add([StoredImage(key, self.grids[key], tensors, (), ()) for key, tensors in stored.items()])
            writer.failed |= failed or {}
            writer.commit()


@pytest.fixture
def small(tmp_path: Path) -> SmallCache:
    return SmallCache(tmp_path / SmallCache.fingerprint.folder_name)


class OneShard:
    """One shard with random features of three images, in any dtype."""

    name = "shard-00000"
    levels, hidden = 4, 8
    grids: dict[str, Grid] = {
        sha256(name.encode()).hexdigest(): grid
        for name, grid in {"a": (1, 4, 4), "b": (1, 2, 2), "c": (1, 6, 10)}.items()
    }
    keys = list(grids)

    def fingerprint(self, dtype: str) -> Fingerprint:
        return Fingerprint(2, "0" * 64, {"out_hidden_size": self.hidden}, {}, self.levels, dtype)

    def write_manifest(self, folder: Path, dtype: str = "float32") -> None:
        write_manifest(folder, self.fingerprint(dtype))

    def random_tensors(self, dtype: str, seed: int = 0) -> dict[str, tuple[torch.Tensor, ...]]:
        """What is stored of each image. Every bit pattern may occur: NaNs, infinities, negative zero."""
        storage, generator = STORAGE[dtype], torch.Generator().manual_seed(seed)
        tensors = {}
        for key, (t, h, w) in self.grids.items():
            num_tokens = t * h * w // 4
            shape = (num_tokens, self.levels, self.hidden * storage.stored.itemsize)
            features = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(storage.stored)
            scale = torch.rand(num_tokens, self.levels, generator=generator)
            tensors[key] = (features, scale) if storage.is_scaled else (features,)
        return tensors

    def stored(self, tensors: Mapping[str, tuple[torch.Tensor, ...]]) -> list[StoredImage]:
        norms, peaks = (1.0,) * self.levels, (2.0,) * self.levels
        return [StoredImage(key, self.grids[key], of_image, norms, peaks) for key, of_image in tensors.items()]

    def open_writer(self, folder: Path, dtype: str = "float32") -> ShardWriter:
        return ShardWriter(folder, self.name, self.fingerprint(dtype), len(self.grids))

    def write_cache(self, folder: Path, dtype: str = "float32") -> dict[str, tuple[torch.Tensor, ...]]:
        """Write a cache of one shard with two calls of `add`; returns what was written."""
        tensors = self.random_tensors(dtype)
        self.write_manifest(folder, dtype)
        with self.open_writer(folder, dtype) as writer:
            images = self.stored(tensors)
            writer.add(images[:1])
            writer.add(images[1:])
            assert writer.commit()
        return tensors

    @staticmethod
    def bits(*tensors: torch.Tensor) -> bytes:
        return b"".join(bytes(raw_bytes(tensor)) for tensor in tensors)

    @staticmethod
    def named(tensors: Mapping[str, tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
        """The tensors under their names in the safetensors file."""
        suffixes = "", SCALE_SUFFIX
        return {
            key + suffix: tensor
            for key, of_image in tensors.items()
            for tensor, suffix in zip(of_image, suffixes, strict=False)
        }

    @staticmethod
    def files(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def assert_whole(self, folder: Path) -> Receipt:
        """Every byte of the shard matches its receipt."""
        content, receipt = shard_path(folder, self.name).read_bytes(), read_receipt(folder, self.name)
        assert len(content) == receipt.size_bytes
        assert xxhash.xxh3_64_hexdigest(content[: receipt.header_bytes]) == receipt.header_xxh3_64
        for entry in receipt.images.values():
            found = content[entry.offset : entry.offset + entry.size_bytes]
            assert xxhash.xxh3_64_hexdigest(found) == entry.xxh3_64
        return receipt


@pytest.fixture(scope="session")
def one_shard() -> OneShard:
    return OneShard()
