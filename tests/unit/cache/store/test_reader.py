"""Finding, opening and reading a cache: the right bytes, or a clear error with the command to run next.

Also by processes and threads, with few open files, and without writing to it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.small_caches import SmallCache, features_in, flip

from lookonce.cache.store import reader
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    Failure,
    Plan,
    PlannedImage,
    Shard,
    extend_plan,
    read_receipt,
    receipt_path,
    to_text,
)
from lookonce.cache.store.reader import VisionCache, find_cache, write_index
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing

DAMAGE_IS_AN_ERROR = pytest.mark.guarantee("A flipped byte is an error, never a training sample.")

UNKNOWN = "f" * 64
BUILD, REPAIR = "lookonce cache build", "lookonce cache repair"


def rewrite_receipt(folder: Path, shard: str, **changes: object) -> Path:
    """Replace a receipt by one with other values and a valid checksum."""
    path = receipt_path(folder, shard)
    path.write_text(to_text(replace(read_receipt(folder, shard), **changes)))
    return path


@pytest.fixture(params=[False, True], ids=["without index", "with index"])
def with_or_without_index(request: pytest.FixtureRequest, small: SmallCache) -> None:
    if request.param:
        write_index(small.folder, small.fingerprint.sha256)


def test_a_cache_has_the_content_of_its_receipts(small, with_or_without_index):
    cache = VisionCache.open(str(small.folder))
    assert (len(cache), cache.num_shards, cache.failed) == (6, 2, {})
    assert list(cache.keys()) == sorted(small.keys)
    assert cache.size_bytes == sum(path.stat().st_size for path in (small.folder / "shards").iterdir())
    receipts = [read_receipt(small.folder, f"shard-{number:05d}") for number in range(2)]
    assert cache.encode_seconds == pytest.approx(sum(receipt.seconds for receipt in receipts))
    assert cache.fingerprint == small.fingerprint
    assert all(key in cache for key in small.keys)
    assert UNKNOWN not in cache
    assert features_in(cache) == small.as_bytes
    assert all(cache[key].shape == small.features[key].shape for key in small.keys)
    assert [cache.grid_thw(key) for key in small.keys] == [small.grids[key] for key in small.keys]
    for number, key in enumerate(small.keys):
        shard, entry = cache.entry(key)
        assert shard == f"shard-{number // small.images_per_shard:05d}"
        assert entry == replace(receipts[number // small.images_per_shard].images[key], norms=(), peaks=())


def test_get_many_keeps_the_order_of_the_keys(small):
    wanted = [small.keys[4], small.keys[0], small.keys[4], *reversed(small.keys)] * 20
    got = VisionCache.open(small.folder).get_many(iter(wanted))
    assert all(torch.equal(one, small.features[key]) for one, key in zip(got, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3"])
def test_pinned_features_are_the_same(small, tmp_path, dtype):
    fingerprint = replace(small.fingerprint, dtype=dtype)
    small.write_manifest(tmp_path, fingerprint)
    small.write_shard(
        tmp_path, 0, {small.keys[0]: small.features[small.keys[0]].to(fingerprint.storage.compute)}, fingerprint
    )
    cache = VisionCache.open(tmp_path)
    [got] = cache.get_many([small.keys[0]], pin=True)
    assert torch.equal(got, cache[small.keys[0]]) and got.is_pinned()


@DAMAGE_IS_AN_ERROR
@pytest.mark.parametrize("position", [0, -1])
def test_a_flipped_byte_is_an_error_for_its_image_alone(small, position):
    shard, entry = VisionCache.open(small.folder).entry(small.keys[1])
    flip(shard_path(small.folder, shard), entry.offset + position % entry.size_bytes)
    cache = VisionCache.open(small.folder)
    for ask in (lambda: cache[small.keys[1]], lambda: cache.get_many(small.keys)):
        with pytest.raises(CacheCorrupt) as caught:
            ask()
        for text in (small.keys[1], str(shard_path(small.folder, "shard-00000")), "checksum", f"run: {REPAIR}"):
            assert text in str(caught.value)
    for key in set(small.keys) - {small.keys[1]}:
        assert torch.equal(cache[key], small.features[key])


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_is_refused_with_both_sizes(small, change):
    path = shard_path(small.folder, "shard-00001")
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(CacheCorrupt) as caught:
        VisionCache.open(small.folder)
    for text in (str(path), f"has {size + change:,} bytes", f"expected {size:,}", f"run: {REPAIR}"):
        assert text in str(caught.value)


def test_a_shard_truncated_after_opening_is_an_error_when_read(small):
    cache = VisionCache.open(small.folder)
    last = max(small.keys[:3], key=lambda key: cache.entry(key)[1].offset)
    path = shard_path(small.folder, "shard-00000")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CacheCorrupt, match=f"{last}.* are truncated; run: {REPAIR}"):
        cache[last]


@pytest.mark.parametrize("lost", ["shard-00001", "all"])
def test_a_missing_shard_is_refused(small, with_or_without_index, lost):
    path = shard_path(small.folder, "shard-00000" if lost == "all" else lost)
    shutil.rmtree(path.parent) if lost == "all" else path.unlink()
    with pytest.raises(CacheCorrupt, match=f"^{path} is missing; run: {REPAIR}"):
        VisionCache.open(small.folder)


def test_a_receipt_whose_numbers_disagree_is_refused(small):
    images = read_receipt(small.folder, "shard-00000").images
    rewrite_receipt(
        small.folder, "shard-00000", images=images | {small.keys[0]: replace(images[small.keys[0]], num_tokens=999)}
    )
    with pytest.raises(
        CacheCorrupt, match=f"{small.keys[0]} .* have 512 bytes in the receipt, expected 127,872; run: {REPAIR}"
    ):
        VisionCache.open(small.folder)[small.keys[0]]


@pytest.mark.parametrize("planned", [True, False])
def test_a_damaged_image_is_named_by_its_key_and_by_a_file_of_the_plan(small, planned):
    """It was named by its key alone, by which its owner does not know it."""
    if planned:
        image = PlannedImage(small.keys[0], 16, ("/frames/a.jpg", "/frames/copy.jpg"))
        extend_plan(small.folder, Plan(), [Shard("shard-00000", (image,))])
    entry = VisionCache.open(small.folder).entry(small.keys[0])[1]
    flip(shard_path(small.folder, "shard-00000"), entry.offset)
    with pytest.raises(CacheCorrupt) as caught:
        VisionCache.open(small.folder)[small.keys[0]]
    named = f"{small.keys[0]} (/frames/a.jpg)" if planned else small.keys[0]
    assert str(caught.value).startswith(f"the features of image {named} in {small.folder}")


@pytest.mark.parametrize("ask", [VisionCache.__getitem__, VisionCache.grid_thw, VisionCache.entry])
def test_missing_features_name_image_folder_and_command(small, ask):
    with pytest.raises(FeaturesMissing) as caught:
        ask(VisionCache.open(small.folder), UNKNOWN)
    assert (
        str(caught.value) == f"no features of image {UNKNOWN} in {small.folder}; build the cache with: {BUILD} RUN.yaml"
    )


def test_missing_features_of_a_failed_image_are_an_error_with_its_reason(small):
    failure = Failure("a.jpg", "image file is truncated")
    small.write_shard(small.folder, 2, {}, failed={UNKNOWN: failure})
    cache = VisionCache.open(small.folder)
    assert cache.failed == {UNKNOWN: failure}
    assert UNKNOWN not in cache
    with pytest.raises(FeaturesMissing, match=f"{UNKNOWN} .* quarantined: image file is truncated"):
        cache[UNKNOWN]


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


BROKEN = {
    "not JSON": lambda path: path.write_text("{"),
    "no version": lambda path: edit_json(path, lambda value: value.pop("format_version")),
    "unknown dtype": lambda path: edit_json(path, lambda value: value["fingerprint"].update(dtype="float99")),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_broken_manifest_is_refused_by_name(small, damage):
    path = small.folder / "manifest.json"
    damage(path)
    with pytest.raises(CacheCorrupt, match=f"{path} is broken"):
        VisionCache.open(small.folder)


def test_a_cache_of_another_format_version_and_a_folder_without_a_manifest_are_refused_and_not_corrupt(small):
    edit_json(small.folder / "manifest.json", lambda value: value.update(format_version=7))
    with pytest.raises(CacheError, match=f"format version 7, this program reads version 2; .*{BUILD}") as version:
        VisionCache.open(small.folder)
    (small.folder / "manifest.json").unlink()
    with pytest.raises(CacheError, match=f"{small.folder} is not a cache: .*manifest.json.*{BUILD}") as none:
        VisionCache.open(small.folder)
    assert not any(isinstance(caught.value, CacheCorrupt) for caught in (version, none))


def refusal(root: Path, wanted: Fingerprint) -> list[str]:
    """The lines of the error of `find_cache`."""
    with pytest.raises(CacheMismatch) as caught:
        find_cache(root, wanted)
    return str(caught.value).splitlines()


def test_find_cache_names_the_differing_fields_with_both_values(small):
    wanted = replace(
        small.fingerprint, dtype="bfloat16", image_processor=small.fingerprint.image_processor | {"max_pixels": 9999}
    )
    assert refusal(small.folder.parent, wanted) == [
        f"no cache in {small.folder.parent} fits this model and these pixels; cache {small.folder.name} differs in",
        "  dtype: this run 'bfloat16', that cache 'float32'",
        "  image_processor.max_pixels: this run 9999, that cache 25600",
        f"Change the run file back, or build a cache for this run with: {BUILD} RUN.yaml",
    ]
    small.write_manifest(small.folder, replace(small.fingerprint, dtype="bfloat16"))
    assert "  dtype: this run 'float32', that cache 'bfloat16'" in refusal(small.folder.parent, small.fingerprint)


@pytest.mark.parametrize("manifest", ["{", '{"format_version": 99, "fingerprint": {}}'])
def test_find_cache_skips_unreadable_manifests(small, manifest):
    other = small.folder.with_name("00-other")
    other.mkdir()
    (other / "manifest.json").write_text(manifest)
    [line, *_] = refusal(small.folder.parent, replace(small.fingerprint, dtype="bfloat16"))
    assert line.endswith(f"{small.folder.name} differs in")


def test_without_a_cache_find_cache_names_folder_and_command(small, tmp_path):
    with pytest.raises(CacheError, match=f"no cache in {tmp_path / 'nowhere'}; build it with: {BUILD}") as caught:
        find_cache(tmp_path / "nowhere", small.fingerprint)
    assert not isinstance(caught.value, CacheMismatch)


def many_as_bytes(cache: VisionCache) -> dict[str, bytes]:
    keys = list(cache.keys())
    return {key: one.numpy().tobytes() for key, one in zip(keys, cache.get_many(keys), strict=True)}


def num_open_files(folder: Path) -> int:
    """The number of files below a folder that this process has open."""
    gc.collect()
    links = Path("/proc/self/fd").iterdir()
    return sum(link.is_symlink() and os.path.realpath(link).startswith(str(folder.resolve())) for link in links)


def test_a_pickled_cache_reads_the_same(small, with_or_without_index):
    cache = VisionCache.open(small.folder)
    assert features_in(cache) == many_as_bytes(cache) == small.as_bytes
    copy = pickle.loads(pickle.dumps(cache))
    cache.close()
    assert features_in(copy) == many_as_bytes(copy) == small.as_bytes
    assert (copy.fingerprint, copy.folder) == (small.fingerprint, small.folder)


@pytest.mark.parametrize("end", ["close", "__del__"])
def test_closing_or_deleting_a_cache_closes_its_files(small, end):
    cache = VisionCache.open(small.folder)
    assert num_open_files(small.folder) == 0
    assert many_as_bytes(cache) == small.as_bytes
    assert num_open_files(small.folder) == 2
    if end == "close":
        cache.close()
    else:
        del cache
    assert num_open_files(small.folder) == 0


# Python 3.12 warns when a process with threads forks; torch has some, and the child only reads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("reads_before", [False, True])
def test_a_forked_process_reads_the_same_and_leaves_the_parents_files_open(small, reads_before):
    cache = VisionCache.open(small.folder)
    if reads_before:
        many_as_bytes(cache)

    def read_and_close() -> None:
        results.put(many_as_bytes(cache))
        cache.close()

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=read_and_close)
    child.start()
    child.join(timeout=20)
    exit_code = child.exitcode
    child.kill()
    assert exit_code == 0
    assert results.get() == small.as_bytes
    assert features_in(cache) == many_as_bytes(cache) == small.as_bytes


def test_a_file_is_not_closed_while_another_thread_reads_from_it(small, tmp_path, monkeypatch):
    """With one open file each thread evicts those of the others; each read releases the lock halfway."""
    monkeypatch.setattr(reader, "NUM_OPEN", 1)
    preadv = os.preadv

    def slow_preadv(file: int, buffers: list, offset: int) -> int:
        time.sleep(0.0005)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow_preadv)
    small.write_manifest(tmp_path)
    for number, key in enumerate(small.keys):
        small.write_shard(tmp_path, number, {key: small.features[key]})
    cache = VisionCache.open(tmp_path)
    got = cache.get_many(small.keys * 100)
    assert all(torch.equal(one, small.features[key]) for one, key in zip(got, small.keys * 100, strict=True))
    assert num_open_files(tmp_path) == 1


def test_a_cache_is_read_without_writing_to_its_folder(small, with_or_without_index):
    paths = [small.folder, *(path for path in small.folder.rglob("*"))]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}
    try:
        cache = find_cache(small.folder.parent, small.fingerprint)
        assert many_as_bytes(cache) == small.as_bytes
        cache.close()
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths} == before
        assert [small.folder, *small.folder.rglob("*")] == paths
    finally:
        for path in paths:
            path.chmod(0o755)
