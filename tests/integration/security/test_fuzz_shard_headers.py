"""Headers of safetensors files: of shards, of the index and of model weights."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save
from support.fuzzing import cases, mutations
from support.small_caches import SmallCache

from lookonce.cache.maintenance.verify import check_header
from lookonce.cache.store.fingerprint import _hash_weights
from lookonce.cache.store.metadata import read_receipt, shard_name
from lookonce.cache.store.reader import INDEX, INDEX_CHECKSUM, read_index, write_index
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheCorrupt
from lookonce.files import hash_file


class WithLength:
    """A safetensors file with a changed header: the JSON, its length, or any byte."""

    def __init__(self, content: bytes) -> None:
        size = int.from_bytes(content[:8], "little")
        self.header, self.data = json.loads(content[8 : 8 + size]), content[8 + size :]
        if "grid_thw" in self.header.get("__metadata__", {}):
            self.grids = json.loads(self.header["__metadata__"]["grid_thw"])

    def __call__(self, random: Random) -> bytes:
        header = self.header
        if random.random() < 0.2 and "grid_thw" in header.get("__metadata__", {}):
            grids = mutations.as_json(mutations.several(self.grids, random), random).decode("utf-8", "replace")
            header = header | {"__metadata__": header["__metadata__"] | {"grid_thw": grids}}
        if random.random() < 0.7:
            header = mutations.several(header, random)
        text = mutations.as_json(header, random)
        size = len(text) if random.random() < 0.9 else random.choice(mutations.HUGE) % (1 << 64)
        content = size.to_bytes(8, "little") + text + self.data
        return mutations.damaged(content, random) if random.random() < 0.1 else content


def test_damaged_headers_of_shards_are_read_or_refused(tmp_path):
    cache = SmallCache(tmp_path / SmallCache.fingerprint.folder_name)
    path, receipt = shard_path(cache.folder, shard_name(0)), read_receipt(cache.folder, shard_name(0))

    def read(path: Path) -> None:
        for problem in check_header(path, receipt, cache.fingerprint):
            raise CacheCorrupt(problem.what)

    assert cases.fuzz("shard header", WithLength(path.read_bytes()), read, path).holds


def test_damaged_headers_of_weights_are_read_or_refused(tmp_path):
    tensors = {name: torch.ones(2, 4) for name in ("model.visual.a.weight", "model.b.weight", "lm_head.weight")}
    content = WithLength(save(tensors, {"format": "pt"}))
    assert cases.fuzz(
        "weights", content, lambda path: _hash_weights(path, ("model.visual.",)), tmp_path / "a.safetensors"
    ).holds


def test_damaged_indices_are_read_or_left_out(tmp_path):
    """An index can be made again from receipts, so a damaged one is left out and not refused."""
    cache = SmallCache(tmp_path / SmallCache.fingerprint.folder_name)
    write_index(cache.folder, cache.fingerprint.sha256)
    path, num_rows = cache.folder / INDEX, []

    def read(path: Path) -> None:
        (cache.folder / INDEX_CHECKSUM).write_text(hash_file(path) + "\n")
        index = read_index(cache.folder, cache.fingerprint.sha256)
        rows = [index.find(key) for key in index.keys()] if index else []
        num_rows.append(len([index.entry(row) for row in rows if index and row is not None]))

    report = cases.fuzz("index", WithLength(path.read_bytes()), read, path)
    assert not report.faults and report.num_refused == 0
    assert min(num_rows) == 0 < max(num_rows)
