"""Fixtures to build caches with: image files, a fake tower whose features are its input, and claims."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from lookonce.cache.build.worker import BuildOptions, BuildReport, build_cache
from lookonce.cache.format import STORAGE
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.claims import CLAIMS, Claim, Claims
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import Shard, read_plan
from lookonce.claim_file import Process
from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Record
from lookonce.files import TEMPORARY_MARK
from support.saved_cache import SavedCache
from support.small_caches import features_in

PATCH_DIM, NUM_LEVELS = 1536, 4
SHARD_BYTES = 600_000
"""Room for two or three of the noise images."""


class PowerCut(Exception):
    pass


class FakeTower:
    """A tower whose features are the patches themselves: those of a merged block are the levels of one token.

    An image that is all white gets NaN. `limit` is how many images it encodes before it raises `PowerCut`; `on_image`
    is called with the number of each image.
    """

    merge_size, tokens_per_tower_batch = 2, 1
    device = torch.device("cpu")

    def __init__(
        self,
        limit: int | None = None,
        on_image: Callable[[int], object] = lambda number: None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.limit, self.on_image, self.dtype = limit, on_image, dtype
        self.num_encoded = 0
        self.tokens: list[list[int]] = []
        """Those of the images of each batch."""

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        pieces = []
        self.tokens.append([t * h * w // self.merge_size**2 for t, h, w in grids])
        for piece in patches.split([t * h * w for t, h, w in grids]):
            if self.num_encoded == self.limit:
                raise PowerCut
            self.num_encoded += 1
            self.on_image(self.num_encoded)
            pieces.append(piece * torch.nan if (piece == 1).all() else piece)
        return torch.cat(pieces).view(-1, NUM_LEVELS, PATCH_DIM)


def no_tower() -> Any:
    pytest.fail("the tower was loaded")


open_processor = functools.cache(ImageProcessor)


@functools.cache
def _noise(suffix: str, seed: int, size: tuple[int, int] | None) -> bytes:
    """The file of an image of random pixels, which is made once for all tests."""
    rng = np.random.default_rng(seed)
    height, width = size or rng.integers(40, 110, 2)
    file = io.BytesIO()
    pixels = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    pixels.save(file, Image.registered_extensions()[suffix.lower()], compress_level=1)
    return file.getvalue()


class Site:
    """Image files in a folder, and the caches they go into."""

    Tower, PowerCut = FakeTower, PowerCut
    saved: ClassVar[dict[object, SavedCache]] = {}
    """Caches that `build_once` has built, by their images."""
    no_tower = staticmethod(no_tower)

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.processor = path, open_processor(model)
        self.fingerprint = Fingerprint(2, "0" * 64, {"out_hidden_size": PATCH_DIM}, {}, NUM_LEVELS, "float32")

    def noise(self, name: str, seed: int, size: tuple[int, int] | None = None) -> Path:
        """An image file of random pixels; `size` is height and width."""
        path = self.path / name
        path.write_bytes(_noise(path.suffix, seed, size))
        return path

    def folder(self, root: str = "caches") -> Path:
        return self.path / root / self.fingerprint.folder_name

    def options(self, **options: Any) -> BuildOptions:
        return BuildOptions(**{"shard_bytes": SHARD_BYTES, "provenance": {"model": "fake"}} | options)

    def build(
        self, images: ImageIndex, tower: Callable[[], Any] | Any = FakeTower, root: str = "caches", **options: Any
    ) -> BuildReport:
        """Build with a tower, or with a function that returns one."""
        load_tower = tower if callable(tower) else lambda: tower
        return build_cache(
            self.path / root, self.fingerprint, self.processor, images, load_tower, self.options(**options)
        )

    def plan_of(self, images: ImageIndex) -> tuple[Shard, ...]:
        """The shards of a build of these images that has planned and encoded nothing."""
        with pytest.raises(PowerCut):
            self.build(images, FakeTower(0))
        return read_plan(self.folder()).shards

    def build_once(self, images: ImageIndex) -> Path:
        """The folder of a new cache; it is copied if another test has built one of the same images."""
        assert not self.folder().exists()
        names = frozenset((path.relative_to(self.path), key) for path, key in images.key_of.items())
        content = (self.fingerprint.sha256, names)
        if content in self.saved:
            self.saved[content].write(self.folder(), self.path, self.fingerprint.sha256)
        else:
            self.build(images)
            self.saved[content] = SavedCache.of(self.folder(), self.path)
        return self.folder()

    def stored(self, root: str = "caches") -> dict[str, bytes]:
        return features_in(self.folder(root))

    def stamps(self) -> dict[Path, tuple[int, bytes]]:
        """Modification time and content of every shard and receipt."""
        files = [*self.folder().glob("shards/*"), *self.folder().glob("receipts/*")]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

    def leftovers(self, root: str = "caches") -> list[Path]:
        """What a build must not leave when it ends: temporary files, claims, and shards without a receipt."""
        folder = self.folder(root)
        receipts = {path.stem for path in folder.glob("receipts/*")}
        lost = [path for path in folder.glob("shards/*") if path.stem not in receipts]
        return [*folder.rglob(f"*{TEMPORARY_MARK}*"), *folder.glob(f"{CLAIMS}/*"), *lost]

    def quarantine(self) -> list[dict[str, str | None]]:
        path = self.folder() / "quarantine.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @staticmethod
    def index(*paths: Path) -> ImageIndex:
        return index_images([Record(paths, turns=())])

    def use(self, dtype: str) -> torch.dtype:
        """Store in another dtype from now on; returns the dtype in which the tower must compute."""
        self.fingerprint = Fingerprint(2, "0" * 64, {"out_hidden_size": PATCH_DIM}, {}, NUM_LEVELS, dtype)
        return STORAGE[dtype].compute


@pytest.fixture(scope="session")
def make_site(sample: Path) -> Callable[[Path], Site]:
    return lambda path: Site(path, sample / "model")


@pytest.fixture
def site(tmp_path: Path, make_site: Callable[[Path], Site]) -> Site:
    return make_site(tmp_path)


@pytest.fixture
def take(tmp_path: Path) -> Iterator[Callable[..., Claim | None]]:
    """Claims a shard for a worker, without a heartbeat."""
    held: list[Claim] = []

    def take(worker: Process | None = None, shard: str = "shard-00003", expiry_s: float = 60.0) -> Claim | None:
        claim = Claims(tmp_path, worker or Process.this("1/4"), expiry_s).take(shard, 5)
        held.extend([claim] if claim else [])
        return claim

    yield take
    for claim in held:
        with contextlib.suppress(OSError):  # released by the test
            claim.release()


@pytest.fixture
def claim_file(tmp_path: Path) -> Path:
    """The claim file of the shard that `take` claims by default."""
    return tmp_path / CLAIMS / "shard-00003.json"


@pytest.fixture
def images(site: Site) -> ImageIndex:
    """Eight noise images."""
    return site.index(*(site.noise(f"{number}.png", number) for number in range(8)))
