"""Reading a cache: right bytes or a clear error that says what to do, from any thread or process."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from lookonce.cache.fingerprint import Fingerprint
from lookonce.cache.folder import NUM_DIFFERENCES, read_plan
from lookonce.cache.read import VisionCache, find_cache
from lookonce.cache.shards import receipt_path, shard_path, write_shard
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing
from lookonce.files import write_json

FINGERPRINT = Fingerprint(
    format_version=1,
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
COMMAND = "lookonce cache build"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of two shards with three images each."""
    folder = tmp_path / FINGERPRINT.folder_name
    write_json(folder / "manifest.json", {"format_version": 1, "fingerprint": FINGERPRINT.to_json()})
    for number in range(2):
        keys = KEYS[number * IMAGES_PER_SHARD :][:IMAGES_PER_SHARD]
        features = {key: FEATURES[key] for key in keys}
        write_shard(folder, f"shard-{number:05d}", features, GRIDS, FINGERPRINT, 2.0)
    return folder


def flip_a_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def features_as_bytes(cache: VisionCache) -> dict[str, bytes]:
    return {key: cache[key].numpy().tobytes() for key in cache.entries}


AS_BYTES = {key: tensor.numpy().tobytes() for key, tensor in FEATURES.items()}


def test_a_cache_says_what_it_holds(folder):
    cache = VisionCache.open(folder)
    assert (len(cache), cache.num_shards, cache.encode_seconds) == (6, 2, 4.0)
    assert cache.size_bytes == sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert cache.fingerprint == FINGERPRINT
    assert all(key in cache for key in KEYS)
    assert "f" * 64 not in cache
    assert [cache.grid_thw(key) for key in KEYS] == [GRIDS[key] for key in KEYS]


def test_many_features_come_in_the_order_asked_for(folder):
    wanted = [KEYS[4], KEYS[0], KEYS[4]]
    got = VisionCache.open(str(folder)).get_many(wanted)
    assert all(torch.equal(one, FEATURES[key]) for one, key in zip(got, wanted, strict=True))


def test_features_given_out_are_the_callers_own(folder):
    cache = VisionCache.open(folder)
    cache[KEYS[0]].zero_()
    assert torch.equal(cache[KEYS[0]], FEATURES[KEYS[0]])


@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_byte_is_an_error_for_its_image_alone(folder, place):
    entry = VisionCache.open(folder).entries[KEYS[1]]
    flip_a_byte(shard_path(folder, entry.shard), entry.offset + place % entry.size_bytes)
    cache = VisionCache.open(folder)
    with pytest.raises(CacheCorrupt) as caught:
        cache[KEYS[1]]
    for part in (KEYS[1], str(shard_path(folder, "shard-00000")), str(receipt_path(folder, "shard-00000")), COMMAND):
        assert part in str(caught.value)
    for key in set(KEYS) - {KEYS[1]}:
        assert torch.equal(cache[key], FEATURES[key])


def test_without_checks_a_flipped_byte_goes_unnoticed(folder):
    entry = VisionCache.open(folder).entries[KEYS[1]]
    flip_a_byte(shard_path(folder, entry.shard), entry.offset)
    found = VisionCache.open(folder, check=False)[KEYS[1]]
    assert (found != FEATURES[KEYS[1]]).sum() == 1


def test_a_truncated_shard_is_refused_with_both_sizes(folder):
    path = shard_path(folder, "shard-00001")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt) as caught:
        VisionCache.open(folder)
    for part in (str(path), f"{size - 1:,}", f"{size:,}", str(receipt_path(folder, "shard-00001")), COMMAND):
        assert part in str(caught.value)


@pytest.mark.parametrize("check", [True, False])
def test_a_shard_truncated_after_opening_is_an_error_when_read(folder, check):
    cache = VisionCache.open(folder, check=check)
    last = max(KEYS[:3], key=lambda key: cache.entries[key].offset)
    path = shard_path(folder, "shard-00000")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheCorrupt, match=f"{last}.* end before they should.*{COMMAND}"):
        cache[last]


def test_a_missing_shard_is_refused(folder):
    path = shard_path(folder, "shard-00001")
    path.unlink()
    with pytest.raises(CacheCorrupt, match=f"{path} is missing; delete .*{COMMAND}"):
        VisionCache.open(folder)


def without(*names: str) -> Callable[[Path], None]:
    def remove(path: Path) -> None:
        edit_json(path, lambda value: [value.pop(name) for name in names])

    return remove


def without_an_offset(path: Path) -> None:
    edit_json(path, lambda value: value["images"][KEYS[0]].pop("offset"))


def with_a_flat_grid(path: Path) -> None:
    edit_json(path, lambda value: value["images"][KEYS[0]].update(grid_thw=[2, 2]))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_text("{"), id="not JSON"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\xff\xfe"), id="not UTF-8"),
        pytest.param(lambda path: path.write_text("[]"), id="a list"),
        pytest.param(without("shard"), id="no shard"),
        pytest.param(without("images"), id="no images"),
        pytest.param(without("size_bytes"), id="no size"),
        pytest.param(lambda path: edit_json(path, lambda value: value.update(images=[])), id="images a list"),
        pytest.param(lambda path: edit_json(path, lambda value: value.update(size_bytes="large")), id="size a word"),
        pytest.param(without_an_offset, id="image without offset"),
        pytest.param(with_a_flat_grid, id="grid of two numbers"),
    ],
)
def test_a_broken_receipt_is_refused_by_name(folder, damage):
    path = receipt_path(folder, "shard-00000")
    damage(path)
    with pytest.raises(CacheCorrupt) as caught:
        VisionCache.open(folder)
    assert str(path) in str(caught.value)
    assert COMMAND in str(caught.value)


@pytest.mark.parametrize("check", [True, False])
def test_a_receipt_whose_numbers_disagree_is_refused(folder, check):
    edit_json(receipt_path(folder, "shard-00000"), lambda value: value["images"][KEYS[0]].update(num_tokens=999))
    with pytest.raises(CacheCorrupt, match=f"{KEYS[0]} .* bytes by their receipt, not .*{COMMAND}"):
        VisionCache.open(folder, check=check)[KEYS[0]]


def test_a_receipt_of_another_cache_is_refused(folder):
    path = receipt_path(folder, "shard-00000")
    edit_json(path, lambda value: value.update(fingerprint="0" * 64))
    with pytest.raises(CacheCorrupt, match=f"{path} belongs to another cache .0000.*; delete it and run: {COMMAND}"):
        VisionCache.open(folder)


@pytest.mark.parametrize("line", ["{", '{"key": "a"}', "[]"])
def test_a_broken_quarantine_is_refused_by_name(folder, line):
    path = folder / "quarantine.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(CacheCorrupt, match=f"{path} is broken .*; delete it.*{COMMAND}"):
        VisionCache.open(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"shards": [{"name": "a"}]}'])
def test_a_broken_plan_is_refused_by_name(folder, content):
    path = folder / "plan.json"
    path.write_text(content)
    with pytest.raises(CacheCorrupt, match=f"{path} is broken"):
        read_plan(folder)


def test_a_folder_without_manifest_is_no_cache(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(CacheError, match=f"{folder} is no cache: .*manifest.json.*{COMMAND}") as caught:
        VisionCache.open(folder)
    assert not isinstance(caught.value, CacheCorrupt)


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
    with pytest.raises(CacheError, match=f"format version 7, this program reads version 1; .*{COMMAND}") as caught:
        VisionCache.open(folder)
    assert not isinstance(caught.value, CacheCorrupt)


def test_a_pickled_cache_reads_the_same(folder):
    cache = VisionCache.open(folder)
    assert features_as_bytes(cache) == AS_BYTES
    copy = pickle.loads(pickle.dumps(cache))
    cache.close()
    assert features_as_bytes(copy) == AS_BYTES
    assert copy.fingerprint == FINGERPRINT


def test_a_closed_cache_opens_its_files_again(folder):
    cache = VisionCache.open(folder)
    first = features_as_bytes(cache)
    cache.close()
    assert features_as_bytes(cache) == first


# Python 3.12 warns of forking with threads about; torch has some, and the child only reads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("read_before", [False, True])
def test_a_forked_process_reads_the_same_and_leaves_the_parents_files_open(folder, read_before):
    cache = VisionCache.open(folder)
    if read_before:
        features_as_bytes(cache)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=lambda: results.put(features_as_bytes(cache)))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 0
    assert results.get() == AS_BYTES
    assert features_as_bytes(cache) == AS_BYTES


def test_several_threads_read_the_same(folder):
    cache = VisionCache.open(folder)
    wanted = KEYS * 50
    with ThreadPoolExecutor(8) as threads:
        for key, found in zip(wanted, threads.map(cache.__getitem__, wanted), strict=True):
            assert torch.equal(found, FEATURES[key])


@pytest.mark.parametrize("ask", [VisionCache.__getitem__, VisionCache.grid_thw])
def test_missing_features_name_image_folder_and_command(folder, ask):
    with pytest.raises(FeaturesMissing) as caught:
        ask(VisionCache.open(folder), "f" * 64)
    message = str(caught.value)
    assert message.startswith(f"no features of image {'f' * 64} in {folder}")
    assert COMMAND in message


def test_missing_features_of_a_quarantined_image_say_why(folder):
    line = {"key": "f" * 64, "file": "a.jpg", "reason": "image file is truncated"}
    (folder / "quarantine.jsonl").write_text(json.dumps(line) + "\n")
    cache = VisionCache.open(folder)
    assert cache.quarantined == {"f" * 64: "image file is truncated"}
    with pytest.raises(FeaturesMissing, match="f{64}.* quarantined: image file is truncated"):
        cache["f" * 64]


def test_find_cache_opens_the_one_of_this_fingerprint(folder):
    shutil.copytree(folder, folder.with_name("another"))
    cache = find_cache(folder.parent, FINGERPRINT, check=False)
    assert (cache.folder, cache.fingerprint, cache.check) == (folder, FINGERPRINT, False)


def test_find_cache_names_the_differing_fields_with_both_values(folder):
    wanted = replace(FINGERPRINT, dtype="bfloat16", image_processor=FINGERPRINT.image_processor | {"max_pixels": 9999})
    with pytest.raises(CacheMismatch) as caught:
        find_cache(folder.parent, wanted)
    assert str(caught.value).splitlines()[1:3] == [
        "  dtype: this run 'bfloat16', that cache 'float32'",
        "  image_processor.max_pixels: this run 9999, that cache 25600",
    ]
    assert folder.name in str(caught.value)
    assert COMMAND in str(caught.value)


def test_find_cache_compares_with_the_closest_cache(folder):
    far = replace(FINGERPRINT, tower_sha256="1" * 64, num_levels=1, dtype="bfloat16")
    write_json(folder.parent / "00-far" / "manifest.json", {"format_version": 1, "fingerprint": far.to_json()})
    with pytest.raises(CacheMismatch) as caught:
        find_cache(folder.parent, replace(FINGERPRINT, dtype="bfloat16"))
    assert f"{folder.name} differs in\n  dtype: this run 'bfloat16', that cache 'float32'\nChange" in str(caught.value)


def test_find_cache_passes_over_caches_of_other_format_versions(folder):
    write_json(folder.parent / "00-newer" / "manifest.json", {"format_version": 99, "fingerprint": {}})
    with pytest.raises(CacheMismatch, match=f"{folder.name} differs in"):
        find_cache(folder.parent, replace(FINGERPRINT, dtype="bfloat16"))


def test_find_cache_cuts_long_lists_of_differences(folder):
    extra = {f"option_{number}": number for number in range(NUM_DIFFERENCES + 3)}
    with pytest.raises(CacheMismatch) as caught:
        find_cache(folder.parent, replace(FINGERPRINT, tower_config=FINGERPRINT.tower_config | extra))
    assert str(caught.value).count("this run") == NUM_DIFFERENCES + 1  # and one in the advice
    assert "and 3 more" in str(caught.value)


def test_find_cache_refuses_a_folder_whose_manifest_says_something_else(folder):
    edit_json(folder / "manifest.json", lambda value: value["fingerprint"].update(dtype="bfloat16"))
    with pytest.raises(CacheMismatch, match="dtype: this run 'float32', that cache 'bfloat16'"):
        find_cache(folder.parent, FINGERPRINT)


def test_find_cache_where_there_is_none_names_place_and_command(tmp_path):
    with pytest.raises(CacheError, match=f"no cache in {tmp_path / 'nowhere'}; make it with: {COMMAND}") as caught:
        find_cache(tmp_path / "nowhere", FINGERPRINT)
    assert not isinstance(caught.value, CacheMismatch)
