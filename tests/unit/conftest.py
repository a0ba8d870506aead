"""Fixtures to build caches with: image files, a fake tower whose features are its input, claims; and a fake Hub."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lookonce.cache.build.report import BuildReport
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.claims import CLAIMS, Claim, Claims, Worker
from lookonce.cache.store.dtypes import STORAGE
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Record
from lookonce.files import TEMPORARY_MARK

PATCH_DIM, NUM_LEVELS = 1536, 4
SHARD_BYTES = 1_300_000
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

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
        pieces = []
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


class Site:
    """Image files in a folder, and the caches they go into."""

    Tower, PowerCut = FakeTower, PowerCut
    no_tower = staticmethod(no_tower)

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.processor = path, open_processor(model)
        self.fingerprint = Fingerprint(2, "0" * 64, {"out_hidden_size": PATCH_DIM}, {}, NUM_LEVELS, "float32")

    def noise(self, name: str, seed: int, size: tuple[int, int] | None = None) -> Path:
        """An image file of random pixels; `size` is height and width."""
        rng = np.random.default_rng(seed)
        height, width = size or rng.integers(40, 200, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(self.path / name)
        return self.path / name

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

    def stored(self, root: str = "caches") -> dict[str, bytes]:
        """All features of a cache, with checksums compared."""
        cache = VisionCache.open(self.folder(root))
        return {key: bytes(raw_bytes(cache[key])) for key in cache.keys()}  # noqa: SIM118

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


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Unit tests do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


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

    def take(worker: Worker | None = None, shard: str = "shard-00003", expiry_s: float = 60.0) -> Claim | None:
        claim = Claims(tmp_path, worker or Worker.this_process("1/4"), expiry_s).take(shard, 5)
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


@dataclass
class Hub:
    """The part of the Hub that downloads of one repository need; it has two commits with the same files."""

    name: str
    kind: str
    """The kind of repository: `models` or `datasets`."""
    files: dict[str, bytes]
    tags: list[str]
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    refuses: tuple[int, str] | None = None
    """Status and error code of every answer, if set."""
    first: str = "1" * 39 + "a"
    second: str = "2" * 39 + "b"
    """The commit that `main` names."""

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of the answer to a request."""
        self.asked.append(path)
        commit = self.first if self.first in path else self.second
        api, file = f"/api/{self.kind}/{self.name}", path.partition(f"/{self.name}/resolve/{commit}/")[2]
        if self.refuses:
            return self.refuses[0], b"{}", {"X-Error-Code": self.refuses[1]}
        if file:
            return 200, self.files[file], {"X-Repo-Commit": commit}
        if path.startswith(f"{api}/tree/"):
            tree = [{"type": "file", "path": key, "size": len(data), "oid": key} for key, data in self.files.items()]
            return 200, json.dumps(tree).encode(), {}
        if path in (api, f"{api}/revision/main", f"{api}/revision/{commit}"):
            files = [{"rfilename": key} for key in self.files]
            info = {"id": self.name, "sha": commit, "siblings": files, "tags": self.tags}
            return 200, json.dumps(info).encode(), {}
        return 404, b"{}", {"X-Error-Code": "RevisionNotFound" if path.startswith(api) else "RepoNotFound"}


@pytest.fixture
def make_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hub]]:
    """Starts a Hub that huggingface_hub uses instead of the real one; downloads go to the test's folder."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def make(*of_hub: Any) -> Hub:
        hub = Hub(*of_hub)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body, headers = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                etag = hashlib.sha256(body).hexdigest()
                for key, value in ({"Content-Length": str(len(body)), "ETag": f'"{etag}"'} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        changes = {
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        }
        for key, value in changes.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
        return hub

    yield make
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()
