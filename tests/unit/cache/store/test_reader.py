"""Reading a cache: right bytes or a clear error that says what to do, from any thread or process."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import xxhash

from lookonce.cache.store import reader as read
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.index import write_index
from lookonce.cache.store.manifest import NUM_DIFFERENCES
from lookonce.cache.store.reader import NUM_OPEN, VisionCache, find_cache
from lookonce.cache.store.receipts import Entry, Failure, Receipt, read_receipt, receipt_path, to_text
from lookonce.cache.store.shards import Packed, ShardWriter, shard_path
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing
from lookonce.files import write_json

FINGERPRINT = Fingerprint(
    format_version=2,
    tower_sha256="0" * 64,
    tower_config={"out_hidden_size": 8},
    image_processor={"backend": "pil", "min_pixels": 4096, "max_pixels": 25_600},
    num_levels=4,
    dtype="float32",
)
KEYS = [sha256(bytes([number])).hexdigest() for number in range(6)]
IMAGES_PER_SHARD = 3
FEATURES = {key: torch.arange(32.0 * (4 + number)).view(-1, 4, 8) + number for number, key in enumerate(KEYS)}
GRIDS = {key: (1, 2, 2 * (4 + number)) for number, key in enumerate(KEYS)}
UNKNOWN = "f" * 64
BUILD, REPAIR = "lookonce cache build", "lookonce cache repair"


def write_manifest(folder: Path, fingerprint: Fingerprint = FINGERPRINT) -> None:
    version, value = fingerprint.format_version, fingerprint.to_json()
    manifest = {"format_version": version, "fingerprint": value, "sha256": fingerprint.sha256}
    write_json(folder / "manifest.json", manifest)


def write_shard(
    folder: Path,
    number: int,
    features: dict[str, torch.Tensor],
    fingerprint: Fingerprint = FINGERPRINT,
    failed: dict[str, Failure] | None = None,
) -> None:
    with ShardWriter(folder, f"shard-{number:05d}", fingerprint, len(features)) as writer:
        packed = [Packed(key, GRIDS[key], fingerprint.storage.pack(item), (), ()) for key, item in features.items()]
        writer.add(packed)
        writer.failed |= failed or {}
        writer.commit()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of two shards with three images each."""
    folder = tmp_path / FINGERPRINT.folder_name
    write_manifest(folder)
    for number in range(2):
        keys = KEYS[number * IMAGES_PER_SHARD :][:IMAGES_PER_SHARD]
        write_shard(folder, number, {key: FEATURES[key] for key in keys})
    return folder


def flip_a_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def rewrite_receipt(folder: Path, shard: str, **changes: object) -> Path:
    """Replace a receipt by one that says something else and is in itself whole."""
    path = receipt_path(folder, shard)
    path.write_text(to_text(replace(read_receipt(folder, shard), **changes)))
    return path


def synthetic_cache(folder: Path, num_shards: int, images_per_shard: int) -> list[str]:
    """A cache with real receipts and shards that are one file of zeros; gives the keys, sorted."""
    write_manifest(folder)
    size_bytes = FINGERPRINT.bytes_per_token
    zeros, checksum = folder / "zeros", xxhash.xxh3_64_hexdigest(bytes(size_bytes))
    (folder / "shards").mkdir()
    (folder / "receipts").mkdir()
    zeros.touch()
    os.truncate(zeros, 4096 + images_per_shard * size_bytes)
    keys = []
    for number in range(num_shards):
        name = f"shard-{number:05d}"
        images = {
            sha256(f"{number}/{image}".encode()).hexdigest(): Entry(
                4096 + image * size_bytes, size_bytes, 1, (1, 2, 2), checksum, (1.0,) * 4, (2.0,) * 4
            )
            for image in range(images_per_shard)
        }
        receipt = Receipt(name, FINGERPRINT.sha256, zeros.stat().st_size, 4096, "0" * 16, "node", 1.0, 1.0, images)
        receipt_path(folder, name).write_text(to_text(receipt))
        os.link(zeros, shard_path(folder, name))
        keys += images
    return sorted(keys)


def features_as_bytes(cache: VisionCache) -> dict[str, bytes]:
    return {key: cache[key].numpy().tobytes() for key in cache.keys()}


def many_as_bytes(cache: VisionCache) -> dict[str, bytes]:
    keys = list(cache.keys())
    return {key: one.numpy().tobytes() for key, one in zip(keys, cache.get_many(keys), strict=True)}


def num_open_files(folder: Path) -> int:
    """Of this process, below a folder."""
    gc.collect()
    links = Path("/proc/self/fd").iterdir()
    return sum(link.is_symlink() and os.path.realpath(link).startswith(str(folder.resolve())) for link in links)


AS_BYTES = {key: tensor.numpy().tobytes() for key, tensor in FEATURES.items()}


@pytest.mark.parametrize("indexed", [False, True])
def test_a_cache_says_what_it_holds(folder, indexed):
    if indexed:
        write_index(folder, FINGERPRINT.sha256)
    cache = VisionCache.open(folder)
    assert (len(cache), cache.num_shards, cache.failed) == (6, 2, {})
    assert list(cache.keys()) == sorted(KEYS)
    assert cache.size_bytes == sum(path.stat().st_size for path in (folder / "shards").iterdir())
    receipts = [read_receipt(folder, f"shard-{number:05d}") for number in range(2)]
    assert cache.encode_seconds == pytest.approx(sum(receipt.seconds for receipt in receipts))
    assert cache.fingerprint == FINGERPRINT
    assert all(key in cache for key in KEYS)
    assert UNKNOWN not in cache
    assert [cache.grid_thw(key) for key in KEYS] == [GRIDS[key] for key in KEYS]
    for number, key in enumerate(KEYS):
        shard, entry = cache.entry(key)
        assert shard == f"shard-{number // IMAGES_PER_SHARD:05d}"
        assert entry == replace(receipts[number // IMAGES_PER_SHARD].images[key], norms=(), peaks=())


@pytest.mark.parametrize("indexed", [False, True])
def test_features_are_those_that_were_written(folder, indexed):
    if indexed:
        write_index(folder, FINGERPRINT.sha256)
    cache = VisionCache.open(str(folder))
    assert features_as_bytes(cache) == AS_BYTES
    assert all(cache[key].shape == FEATURES[key].shape for key in KEYS)


def test_many_features_come_in_the_order_asked_for(folder):
    wanted = [KEYS[4], KEYS[0], KEYS[4], *reversed(KEYS)] * 20
    got = VisionCache.open(folder).get_many(iter(wanted))
    assert all(torch.equal(one, FEATURES[key]) for one, key in zip(got, wanted, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_pinning_does_nothing_without_a_gpu(folder):
    [got] = VisionCache.open(folder).get_many([KEYS[0]], pin=True)
    assert torch.equal(got, FEATURES[KEYS[0]]) and not got.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8_e4m3"])
def test_pinned_features_are_the_same(tmp_path, dtype):
    fingerprint = replace(FINGERPRINT, dtype=dtype)
    write_manifest(tmp_path, fingerprint)
    write_shard(tmp_path, 0, {KEYS[0]: FEATURES[KEYS[0]].to(fingerprint.storage.compute)}, fingerprint)
    cache = VisionCache.open(tmp_path)
    [got] = cache.get_many([KEYS[0]], pin=True)
    assert torch.equal(got, cache[KEYS[0]]) and got.is_pinned()


def test_features_given_out_are_the_callers_own(folder):
    cache = VisionCache.open(folder)
    cache[KEYS[0]].zero_()
    cache.get_many([KEYS[0]])[0].zero_()
    assert torch.equal(cache[KEYS[0]], FEATURES[KEYS[0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_features_come_in_the_dtype_of_the_tower(tmp_path, dtype):
    fingerprint = replace(FINGERPRINT, dtype=dtype)
    write_manifest(tmp_path, fingerprint)
    features = {key: torch.randn(item.shape).bfloat16() for key, item in FEATURES.items()}
    write_shard(tmp_path, 0, features, fingerprint)
    cache, storage = VisionCache.open(tmp_path), fingerprint.storage
    for key, item in features.items():
        stored, *scale = storage.pack(item)
        for got in (cache[key], *cache.get_many([key])):
            assert (got.dtype, got.shape) == (torch.bfloat16, item.shape)
            assert torch.equal(got, storage.unpack(stored, *scale or [None]))
            assert torch.equal(got, item) == (dtype == "bfloat16")


@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_byte_is_an_error_for_its_image_alone(folder, place):
    shard, entry = VisionCache.open(folder).entry(KEYS[1])
    flip_a_byte(shard_path(folder, shard), entry.offset + place % entry.size_bytes)
    cache = VisionCache.open(folder)
    for ask in (lambda: cache[KEYS[1]], lambda: cache.get_many(KEYS)):
        with pytest.raises(CacheCorrupt) as caught:
            ask()
        for part in (KEYS[1], str(shard_path(folder, "shard-00000")), "checksum", f"run: {REPAIR}"):
            assert part in str(caught.value)
    for key in set(KEYS) - {KEYS[1]}:
        assert torch.equal(cache[key], FEATURES[key])


@pytest.mark.parametrize("part", ["features", "scales"])
def test_a_flipped_byte_in_eight_bits_or_their_scales_is_an_error(tmp_path, part):
    fingerprint = replace(FINGERPRINT, dtype="fp8_e4m3")
    write_manifest(tmp_path, fingerprint)
    write_shard(tmp_path, 0, {KEYS[0]: FEATURES[KEYS[0]].bfloat16()}, fingerprint)
    _, entry = VisionCache.open(tmp_path).entry(KEYS[0])
    flip_a_byte(shard_path(tmp_path, "shard-00000"), entry.offset + (0 if part == "features" else entry.size_bytes - 1))
    with pytest.raises(CacheCorrupt, match="checksum"):
        VisionCache.open(tmp_path)[KEYS[0]]


def test_without_checks_a_flipped_byte_goes_unnoticed(folder):
    shard, entry = VisionCache.open(folder).entry(KEYS[1])
    flip_a_byte(shard_path(folder, shard), entry.offset)
    found = VisionCache.open(folder, check=False)[KEYS[1]]
    assert (found != FEATURES[KEYS[1]]).sum() == 1


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_is_refused_with_both_sizes(folder, change):
    path = shard_path(folder, "shard-00001")
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(CacheCorrupt) as caught:
        VisionCache.open(folder)
    for part in (str(path), f"has {size + change:,} bytes", f"says {size:,}", f"run: {REPAIR}"):
        assert part in str(caught.value)


@pytest.mark.parametrize("check", [True, False])
def test_a_shard_truncated_after_opening_is_an_error_when_read(folder, check):
    cache = VisionCache.open(folder, check=check)
    last = max(KEYS[:3], key=lambda key: cache.entry(key)[1].offset)
    path = shard_path(folder, "shard-00000")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CacheCorrupt, match=f"{last}.* end before they should; run: {REPAIR}"):
        cache[last]


@pytest.mark.parametrize("indexed", [False, True])
def test_a_missing_shard_is_refused(folder, indexed):
    if indexed:
        write_index(folder, FINGERPRINT.sha256)
    path = shard_path(folder, "shard-00001")
    path.unlink()
    with pytest.raises(CacheCorrupt, match=f"^{path} is missing; run: {REPAIR}"):
        VisionCache.open(folder)


def test_a_missing_folder_of_shards_is_refused(folder):
    shutil.rmtree(folder / "shards")
    path = shard_path(folder, "shard-00000")
    with pytest.raises(CacheCorrupt, match=f"^{path} is missing; run: {REPAIR}"):
        VisionCache.open(folder)


def test_shards_in_work_beside_the_finished_ones_do_not_matter(folder):
    (folder / "shards" / "shard-00002.safetensors").touch()
    (folder / "shards" / "shard-00003.safetensors.tmp-host-1-abcdef01").symlink_to("gone")
    assert features_as_bytes(VisionCache.open(folder)) == AS_BYTES


def test_a_cache_without_shards_is_empty(tmp_path):
    write_manifest(tmp_path)
    cache = VisionCache.open(tmp_path)
    assert (len(cache), cache.num_shards, cache.size_bytes, cache.encode_seconds) == (0, 0, 0, 0)
    assert KEYS[0] not in cache and list(cache.keys()) == []


def test_a_broken_receipt_is_refused_by_name(folder):
    path = receipt_path(folder, "shard-00000")
    flip_a_byte(path, 200)
    with pytest.raises(CacheCorrupt, match=f"^receipt {path} is not what was written; run: {REPAIR}"):
        VisionCache.open(folder)


@pytest.mark.parametrize("check", [True, False])
def test_a_receipt_whose_numbers_disagree_is_refused(folder, check):
    images = read_receipt(folder, "shard-00000").images
    rewrite_receipt(folder, "shard-00000", images=images | {KEYS[0]: replace(images[KEYS[0]], num_tokens=999)})
    with pytest.raises(CacheCorrupt, match=f"{KEYS[0]} .* are 512 bytes by their receipt, not 127,872; run: {REPAIR}"):
        VisionCache.open(folder, check=check)[KEYS[0]]


def test_a_receipt_of_another_cache_is_refused(folder):
    path = rewrite_receipt(folder, "shard-00000", fingerprint="0" * 64)
    with pytest.raises(CacheCorrupt, match=f"^{path} belongs to another cache .0000.*; run: {REPAIR}"):
        VisionCache.open(folder)


def test_a_folder_without_manifest_is_no_cache(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(CacheError, match=f"{folder} is no cache: .*manifest.json.*{BUILD}") as caught:
        VisionCache.open(folder)
    assert not isinstance(caught.value, CacheCorrupt)


def without(*names: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        edit_json(path, lambda value: [value.pop(name) for name in names])

    return remove


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_text("{"), id="not JSON"),
        pytest.param(lambda path: path.write_text("[]"), id="a list"),
        pytest.param(without("format_version"), id="no version"),
        pytest.param(without("fingerprint"), id="no fingerprint"),
        pytest.param(lambda path: edit_json(path, lambda value: value["fingerprint"].pop("dtype")), id="no dtype"),
        pytest.param(
            lambda path: edit_json(path, lambda value: value["fingerprint"].update(dtype="float99")), id="unknown dtype"
        ),
    ],
)
def test_a_broken_manifest_is_refused_by_name(folder, damage):
    path = folder / "manifest.json"
    damage(path)
    with pytest.raises(CacheCorrupt, match=f"{path} is broken"):
        VisionCache.open(folder)


def test_another_format_version_is_refused_with_both_versions(folder):
    edit_json(folder / "manifest.json", lambda value: value.update(format_version=7))
    with pytest.raises(CacheError, match=f"format version 7, this program reads version 2; .*{BUILD}") as caught:
        VisionCache.open(folder)
    assert not isinstance(caught.value, CacheCorrupt)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_pickled_cache_reads_the_same(folder, indexed):
    if indexed:
        write_index(folder, FINGERPRINT.sha256)
    cache = VisionCache.open(folder)
    assert features_as_bytes(cache) == many_as_bytes(cache) == AS_BYTES
    copy = pickle.loads(pickle.dumps(cache))
    cache.close()
    assert features_as_bytes(copy) == many_as_bytes(copy) == AS_BYTES
    assert (copy.fingerprint, copy.folder, copy.check) == (FINGERPRINT, folder, True)


def test_a_closed_cache_opens_its_files_again(folder):
    cache = VisionCache.open(folder)
    for _ in range(2):
        assert features_as_bytes(cache) == many_as_bytes(cache) == AS_BYTES
        cache.close()


def threads() -> set[threading.Thread]:
    """Those of `get_many`."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("features")}


def threads_left(before: set[threading.Thread]) -> set[threading.Thread]:
    """Those that are new, once those of a cache that is gone have had time to end."""
    gc.collect()
    deadline = time.monotonic() + 10
    while (left := threads() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


@pytest.mark.parametrize("end", ["close", "__del__"])
def test_files_and_threads_end_with_close_and_with_the_cache(folder, end):
    before = threads()  # of the cache that all tests share
    cache = VisionCache.open(folder)
    assert num_open_files(folder) == 0
    assert many_as_bytes(cache) == AS_BYTES
    assert num_open_files(folder) == 2
    assert threads() - before
    if end == "close":
        cache.close()
        assert not threads() - before
    else:
        del cache
    assert not threads_left(before)
    assert num_open_files(folder) == 0


# Python 3.12 warns of forking with threads about; torch has some, and the child only reads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("in_child", [features_as_bytes, many_as_bytes])
@pytest.mark.parametrize("read_before", [None, features_as_bytes, many_as_bytes])
def test_a_forked_process_reads_the_same_and_leaves_the_parents_files_open(folder, monkeypatch, read_before, in_child):
    monkeypatch.setattr(read, "NUM_READERS", 1)  # a pool that is full before the fork starts no thread after it
    cache = VisionCache.open(folder)
    if read_before:
        read_before(cache)

    def read_and_close() -> None:
        results.put(in_child(cache))
        cache.close()

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=read_and_close)
    child.start()
    child.join(timeout=20)
    exit_code = child.exitcode
    child.kill()
    assert exit_code == 0
    assert results.get() == AS_BYTES
    assert features_as_bytes(cache) == many_as_bytes(cache) == AS_BYTES


def test_several_threads_read_the_same(folder):
    cache = VisionCache.open(folder)
    wanted = KEYS * 50
    with ThreadPoolExecutor(8) as threads:
        for key, found in zip(wanted, threads.map(cache.__getitem__, wanted), strict=True):
            assert torch.equal(found, FEATURES[key])
        for found in threads.map(lambda _: many_as_bytes(cache), range(8)):
            assert found == AS_BYTES


def test_a_file_is_not_closed_while_another_thread_reads_from_it(tmp_path, monkeypatch):
    """With one file kept open, each thread pushes the others' out; each read gives the lock away in its middle."""
    monkeypatch.setattr(read, "NUM_OPEN", 1)
    preadv = os.preadv

    def slow_preadv(file: int, buffers: list, offset: int) -> int:
        time.sleep(0.0005)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow_preadv)
    write_manifest(tmp_path)
    for number, key in enumerate(KEYS):
        write_shard(tmp_path, number, {key: FEATURES[key]})
    cache = VisionCache.open(tmp_path, check=False)
    got = cache.get_many(KEYS * 100)
    assert all(torch.equal(one, FEATURES[key]) for one, key in zip(got, KEYS * 100, strict=True))
    assert num_open_files(tmp_path) == 1


def test_however_many_shards_are_read_few_files_are_open(tmp_path):
    keys = synthetic_cache(tmp_path, num_shards=2000, images_per_shard=1)
    cache = VisionCache.open(tmp_path)
    for number, key in enumerate(keys):
        assert not cache[key].any()
        assert number % 500 or num_open_files(tmp_path) <= NUM_OPEN
    cache.get_many(keys)
    assert num_open_files(tmp_path) == NUM_OPEN
    assert NUM_OPEN < 256, "the smallest limit that systems in use have"


def test_files_that_are_read_again_and_again_stay_open(tmp_path, monkeypatch):
    keys = synthetic_cache(tmp_path, num_shards=NUM_OPEN, images_per_shard=1)
    cache = VisionCache.open(tmp_path)
    for key in keys:
        cache[key]
    monkeypatch.setattr(os, "open", None)
    for key in reversed(keys):
        cache[key]


def test_opening_6500_images_in_130_shards_is_quick_with_and_without_index(tmp_path):
    keys = synthetic_cache(tmp_path, num_shards=130, images_per_shard=50)
    for make_index in (lambda: None, lambda: write_index(tmp_path, FINGERPRINT.sha256)):
        make_index()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            cache = VisionCache.open(tmp_path)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.5
        assert list(cache.keys()) == keys


@pytest.mark.parametrize("indexed", [False, True])
def test_a_cache_is_read_without_writing_to_its_folder(folder, indexed):
    if indexed:
        write_index(folder, FINGERPRINT.sha256)
    places = [folder, *(path for path in folder.rglob("*"))]
    for path in places:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in places}
    try:
        cache = find_cache(folder.parent, FINGERPRINT)
        assert many_as_bytes(cache) == AS_BYTES
        cache.close()
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in places} == before
        assert [folder, *folder.rglob("*")] == places
    finally:
        for path in places:
            path.chmod(0o755)


@pytest.mark.parametrize("ask", [VisionCache.__getitem__, VisionCache.grid_thw, VisionCache.entry])
def test_missing_features_name_image_folder_and_command(folder, ask):
    with pytest.raises(FeaturesMissing) as caught:
        ask(VisionCache.open(folder), UNKNOWN)
    assert str(caught.value) == f"no features of image {UNKNOWN} in {folder}; make them with: {BUILD} RUN.yaml"


def test_missing_features_of_an_image_that_failed_say_why(folder):
    failure = Failure("a.jpg", "image file is truncated")
    write_shard(folder, 2, {}, failed={UNKNOWN: failure})
    cache = VisionCache.open(folder)
    assert cache.failed == {UNKNOWN: failure}
    assert UNKNOWN not in cache
    with pytest.raises(FeaturesMissing, match=f"{UNKNOWN} .* quarantined: image file is truncated"):
        cache[UNKNOWN]


def test_an_image_that_failed_in_one_shard_and_was_made_in_another_is_there(folder):
    write_shard(folder, 2, {}, failed={KEYS[0]: Failure("a.jpg", "the disk was gone", retry=True)})
    cache = VisionCache.open(folder)
    assert cache.failed == {}
    assert torch.equal(cache[KEYS[0]], FEATURES[KEYS[0]])


def test_find_cache_opens_the_one_of_this_fingerprint(folder):
    shutil.copytree(folder, folder.with_name("another"))
    cache = find_cache(folder.parent, FINGERPRINT, check=False)
    assert (cache.folder, cache.fingerprint, cache.check) == (folder, FINGERPRINT, False)


def refusal(root: Path, wanted: Fingerprint) -> list[str]:
    """The lines of `find_cache`'s message."""
    with pytest.raises(CacheMismatch) as caught:
        find_cache(root, wanted)
    return str(caught.value).splitlines()


def test_find_cache_names_the_differing_fields_with_both_values(folder):
    wanted = replace(FINGERPRINT, dtype="bfloat16", image_processor=FINGERPRINT.image_processor | {"max_pixels": 9999})
    assert refusal(folder.parent, wanted) == [
        f"no cache in {folder.parent} fits this model and these pixels; {folder.name} differs in",
        "  dtype: this run 'bfloat16', that cache 'float32'",
        "  image_processor.max_pixels: this run 9999, that cache 25600",
        f"Change the run file back, or make this run's own cache with: {BUILD} RUN.yaml",
    ]


def test_find_cache_compares_with_the_closest_cache(folder):
    far = replace(FINGERPRINT, tower_sha256="1" * 64, num_levels=1, dtype="bfloat16")
    write_manifest(folder.with_name("00-far"), far)
    found = refusal(folder.parent, replace(FINGERPRINT, dtype="bfloat16"))
    assert found[0].endswith(f"{folder.name} differs in")
    assert found[1:-1] == ["  dtype: this run 'bfloat16', that cache 'float32'"]


def test_find_cache_names_the_version_of_a_cache_of_another_format(folder):
    old = replace(FINGERPRINT, format_version=1)
    write_manifest(folder, old)
    folder.rename(folder.with_name(old.folder_name))
    found = refusal(folder.parent, FINGERPRINT)
    assert found[0].endswith(f"{old.folder_name} differs in")
    assert found[1:-1] == ["  format_version: this run 2, that cache 1"]
    assert BUILD in found[-1]


@pytest.mark.parametrize("manifest", ["{", "[]", '{"format_version": 99, "fingerprint": {}}'])
def test_find_cache_passes_over_what_it_can_not_make_sense_of(folder, manifest):
    other = folder.with_name("00-other")
    other.mkdir()
    (other / "manifest.json").write_text(manifest)
    assert refusal(folder.parent, replace(FINGERPRINT, dtype="bfloat16"))[0].endswith(f"{folder.name} differs in")


def test_find_cache_cuts_long_lists_of_differences(folder):
    extra = {f"option_{number}": number for number in range(NUM_DIFFERENCES + 3)}
    found = refusal(folder.parent, replace(FINGERPRINT, tower_config=FINGERPRINT.tower_config | extra))
    assert len(found) == 1 + NUM_DIFFERENCES + 1 + 1
    assert found[-2] == "  and 3 more"


def test_find_cache_refuses_a_folder_whose_manifest_says_something_else(folder):
    write_manifest(folder, replace(FINGERPRINT, dtype="bfloat16"))
    assert "  dtype: this run 'float32', that cache 'bfloat16'" in refusal(folder.parent, FINGERPRINT)


def test_find_cache_where_there_is_none_names_place_and_command(tmp_path):
    with pytest.raises(CacheError, match=f"no cache in {tmp_path / 'nowhere'}; make it with: {BUILD}") as caught:
        find_cache(tmp_path / "nowhere", FINGERPRINT)
    assert not isinstance(caught.value, CacheMismatch)
