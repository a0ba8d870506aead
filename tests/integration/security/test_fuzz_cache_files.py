"""Files of a cache and headers of model weights, damaged: each is read, or refused in our words.

Receipts and plan files have other values and the checksum that fits them: whoever can write a file of a cache can write
its checksum too, so without it the fuzzer would only find the checksum.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save
from support.fuzzing import cases, mutations

from lookonce.cache.build.progress import index_from_plan
from lookonce.cache.maintenance.verify import check_header
from lookonce.cache.store.fingerprint import Fingerprint, _hash_weights
from lookonce.cache.store.metadata import (
    checksum_line,
    read_manifest,
    read_plan,
    read_quarantine,
    read_receipt,
    shard_name,
)
from lookonce.cache.store.reader import INDEX, INDEX_CHECKSUM, Index, VisionCache, read_index, write_index
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheCorrupt, LookonceError
from lookonce.files import hash_file

pytestmark = pytest.mark.guarantee(
    "A damaged or hostile file is read, or refused with an error message, in bounded time and memory."
)


class WithChecksum:
    """Changed values of a JSON file behind the checksum of what they are written as."""

    def __init__(self, content: bytes) -> None:
        self.value = json.loads(content)
        del self.value["xxh3_64"]

    def __call__(self, random: Random) -> bytes:
        text = mutations.as_json(mutations.several(self.value, random), random)
        body = text[1:] if text.startswith(b"{") else text
        return checksum_line(body).encode() + body if random.random() < 0.95 else text


def test_damaged_receipts_are_read_or_refused(small):
    path = small.folder / "receipts" / f"{shard_name(0)}.json"
    content = json.loads(path.read_bytes())
    content["failed"] = {"a" * 64: {"file": "a.png", "reason": "cut", "retry": True}}
    sha256 = small.fingerprint.sha256

    def read(path: Path) -> None:
        index = Index.from_receipts(small.folder, sha256)
        opened = VisionCache(small.folder, small.fingerprint)
        for key in list(index.keys())[:8]:
            opened[key]

    assert cases.fuzz("receipts", WithChecksum(json.dumps(content).encode()), read, path).holds


ENTRY = {"offset": -1, "size_bytes": 1, "num_tokens": 1, "grid_thw": [1, 1, 1], "xxh3_64": "0" * 16}
RECEIPT = {
    **{"shard": shard_name(0), "fingerprint": "", "size_bytes": 0, "header_bytes": 0, "header_xxh3_64": "", "host": ""},
    **{"finished": 0, "seconds": 0, "images": {}, "failed": {}},
}


@pytest.mark.parametrize(
    ("file", "value"),
    [
        (f"receipts/{shard_name(0)}.json", RECEIPT | {"images": {f"{number:064x}": ENTRY for number in range(9)}}),
        (f"receipts/{shard_name(0)}.json", RECEIPT | {"failed": {f"{number}": {} for number in range(9)}}),
        ("plan.json", {"shards": [{"name": 1}] * 9}),
        ("plan.json", {"shards": [{"name": shard_name(0), "keys": [], "num_tokens": [], "files": [[1] * 9]}]}),
    ],
)
def test_a_file_of_many_mistakes_costs_no_more_than_its_first_one(tmp_path, file, value):
    """A list of a million mistakes would take gigabytes."""
    path, body = tmp_path / file, json.dumps(value).encode()[1:]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(checksum_line(body).encode() + body)
    with pytest.raises(LookonceError, match="is broken") as caught:
        read_plan(tmp_path) if file == "plan.json" else read_receipt(tmp_path, shard_name(0))
    assert isinstance(caught.value.__context__, ValidationError)
    assert caught.value.__context__.error_count() <= 4  # the fields of one item


PLAN = {
    "format_version": 2,
    "found_again": {"keys": ["a" * 64], "num_tokens": [1], "files": [["/data/b.png"]], "stamps": [[[3, 4]]]},
    "shards": [
        {
            "name": shard_name(number),
            "keys": ["a" * 64, "b" * 64],
            "num_tokens": [4, 0],
            "files": [["/data/a.png", "/data/\udcff.png"], ["x.tar/b.png"]],
            "stamps": [[[10, 1_700_000_000_000_000_000], None], [None]],
        }
        for number in range(2)
    ],
}


def test_damaged_plans_are_read_or_refused(tmp_path):
    text = json.dumps({"xxh3_64": "", **PLAN}).encode()

    def read(path: Path) -> None:
        plan = read_plan(tmp_path)
        index_from_plan(plan, [Path("/data/a.png")])
        plan.extension(list(plan.images), 16, 64)

    assert cases.fuzz("plan", WithChecksum(text), read, tmp_path / "plan.json").holds


def test_no_plan_names_a_file_outside_the_cache(tmp_path):
    """A build writes `shards/NAME.safetensors` for a name in the plan."""
    for name in ("../../../../tmp/x", "shard-1/../../x", "/tmp/x", "shard-00000\n", "shard-٠٠٠٠٠", "", "shard-00000.x"):
        body = json.dumps(PLAN | {"shards": [PLAN["shards"][0] | {"name": name}]}).encode()[1:]  # type: ignore[index]
        (tmp_path / "plan.json").write_bytes(checksum_line(body).encode() + body)
        with pytest.raises(LookonceError, match="shards.0.name: String should match pattern .*lookonce cache repair"):
            read_plan(tmp_path)


def test_damaged_manifests_are_read_or_refused(small):
    path = small.folder / "manifest.json"
    value = json.loads(path.read_bytes())

    def make(random: Random) -> bytes:
        changed = mutations.several(value, random)
        with contextlib.suppress(Exception):
            changed["sha256"] = Fingerprint.from_json(changed["fingerprint"]).sha256
        return mutations.as_json(changed, random)

    assert cases.fuzz("manifest", make, lambda path: read_manifest(path.parent), path).holds


def test_damaged_quarantines_are_read_or_refused(tmp_path):
    lines: Any = [{"key": None, "file": "a.png", "reason": "cut"}, {"key": "a" * 64, "file": "b.png", "reason": "x"}]

    def make(random: Random) -> bytes:
        return b"\n".join(mutations.as_json(mutations.several(line, random), random) for line in lines)

    assert cases.fuzz(
        "quarantine", make, lambda path: read_quarantine(path.parent), tmp_path / "quarantine.jsonl"
    ).holds


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


def test_damaged_headers_of_shards_are_read_or_refused(small):
    path, receipt = shard_path(small.folder, shard_name(0)), read_receipt(small.folder, shard_name(0))

    def read(path: Path) -> None:
        for problem in check_header(path, receipt, small.fingerprint):
            raise CacheCorrupt(problem.what)

    assert cases.fuzz("shard header", WithLength(path.read_bytes()), read, path).holds


def test_damaged_headers_of_weights_are_read_or_refused(tmp_path):
    tensors = {name: torch.ones(2, 4) for name in ("model.visual.a.weight", "model.b.weight", "lm_head.weight")}
    content = WithLength(save(tensors, {"format": "pt"}))
    assert cases.fuzz(
        "weights", content, lambda path: _hash_weights(path, ("model.visual.",)), tmp_path / "a.safetensors"
    ).holds


def test_damaged_indices_are_read_or_left_out(small):
    """An index can be made again from receipts, so a damaged one is left out and not refused."""
    write_index(small.folder, small.fingerprint.sha256)
    path, num_rows = small.folder / INDEX, []

    def read(path: Path) -> None:
        (small.folder / INDEX_CHECKSUM).write_text(hash_file(path) + "\n")
        index = read_index(small.folder, small.fingerprint.sha256)
        rows = [index.find(key) for key in index.keys()] if index else []
        num_rows.append(len([index.entry(row) for row in rows if index and row is not None]))

    report = cases.fuzz("index", WithLength(path.read_bytes()), read, path)
    assert not report.faults and report.num_refused == 0
    assert min(num_rows) == 0 < max(num_rows)
