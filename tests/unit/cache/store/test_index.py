"""The index holds exactly the images of the receipts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from lookonce.cache.store.metadata import Entry, Failure, Receipt, receipt_path, to_text
from lookonce.cache.store.reader import INDEX, INDEX_CHECKSUM, Index, file_stats, read_index, write_index
from lookonce.errors import CacheCorrupt
from lookonce.files import hash_file

FINGERPRINT = "ab" * 32
NUM_SHARDS, IMAGES_PER_SHARD = 5, 8
COMMAND = "lookonce cache repair"


def key_of(number: int) -> str:
    return sha256(str(number).encode()).hexdigest()


def entry_of(number: int) -> Entry:
    """Different for each image in every field, and nearly as large as the fields may be."""
    return Entry(
        offset=2**45 + number,
        size_bytes=2**33 + number,
        num_tokens=2**31 + number,
        grid_thw=(1 + number, 2**31 + number, 2**32 - 1 - number),
        xxh3_64=f"{2**64 - 1 - number:016x}" if number % 2 else f"{number:016x}",
    )


def receipt_of(shard: int, images: Mapping[str, Entry], failed: Mapping[str, Failure] | None = None) -> Receipt:
    return Receipt(
        shard=f"shard-{shard:05d}",
        fingerprint=FINGERPRINT,
        size_bytes=10**12 + shard,
        header_bytes=4096,
        header_xxh3_64="0" * 16,
        host="node",
        finished=1.0,
        seconds=0.5 + shard,
        images={key: replace(entry, norms=(1.0,), peaks=(2.0,)) for key, entry in images.items()},
        failed=dict(failed or {}),
    )


def write(folder: Path, *all_receipts: Receipt) -> None:
    for receipt in all_receipts:
        path = receipt_path(folder, receipt.shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_text(receipt))


def images_of(shard: int) -> dict[str, Entry]:
    numbers = range(shard * IMAGES_PER_SHARD, (shard + 1) * IMAGES_PER_SHARD)
    return {key_of(number): entry_of(number) for number in numbers}


RECEIPTS = [receipt_of(shard, images_of(shard)) for shard in range(NUM_SHARDS)]
EXPECTED = {
    key: (f"shard-{shard:05d}", entry) for shard in range(NUM_SHARDS) for key, entry in images_of(shard).items()
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of 40 images in five shards."""
    write(tmp_path, *RECEIPTS)
    return tmp_path


def from_file(folder: Path) -> Index:
    write_index(folder, FINGERPRINT)
    index = read_index(folder, FINGERPRINT)
    assert index is not None
    return index


def from_receipts(folder: Path) -> Index:
    return Index.from_receipts(folder, FINGERPRINT)


MAKE = pytest.mark.parametrize("make", [from_file, from_receipts])


def content(index: Index) -> dict[str, tuple[str, Entry]]:
    return {key: index.entry(index.find(key)) for key in index.keys()}


@MAKE
def test_the_index_has_the_content_of_the_receipts(folder, make):
    index = make(folder)
    assert len(index) == len(EXPECTED)
    assert list(index.keys()) == sorted(EXPECTED)
    assert content(index) == EXPECTED
    assert list(index.shards) == [receipt.shard for receipt in RECEIPTS]
    assert index.columns["shard_bytes"].tolist() == [receipt.size_bytes for receipt in RECEIPTS]
    assert index.columns["shard_seconds"].tolist() == [receipt.seconds for receipt in RECEIPTS]
    assert index.failed == {}


def test_entries_from_the_file_have_python_types(folder):
    _, entry = from_file(folder).entry(3)
    assert json.loads(json.dumps(entry.__dict__)) == {
        **entry.__dict__,
        "grid_thw": list(entry.grid_thw),
        "norms": [],
        "peaks": [],
    }


@pytest.mark.parametrize("with_file", [False, True])
def test_open_reads_the_file_or_else_the_receipts(folder, monkeypatch, with_file):
    if with_file:
        write_index(folder, FINGERPRINT)
        monkeypatch.setattr(Index, "from_receipts", None)
    assert content(Index.open(folder, FINGERPRINT)) == EXPECTED


@MAKE
@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key_of(10**6), id="unknown"),
        pytest.param("0" * 64, id="lowest"),
        pytest.param("f" * 64, id="highest"),
        pytest.param("", id="empty"),
        pytest.param(key_of(3)[:-1], id="a digit short"),
        pytest.param(key_of(3)[:-2], id="a byte short"),
        pytest.param(key_of(3)[:16], id="its first 16 digits"),
        pytest.param(key_of(3)[:14], id="its first 14 digits"),
        pytest.param(key_of(3) + "00", id="a byte long"),
        pytest.param(key_of(3)[:-2] + "00", id="another last byte"),
        pytest.param(key_of(3).upper(), id="upper case"),
        pytest.param(key_of(3) + "\n", id="with a line end"),
        pytest.param(f"{key_of(3)[:32]} {key_of(3)[32:]}", id="with a blank"),
        pytest.param("0x" + key_of(3)[2:], id="with 0x"),
        pytest.param("-" + key_of(3)[1:], id="negative"),
        pytest.param("+" + key_of(3)[1:], id="positive"),
        pytest.param("_" + key_of(3)[1:], id="with an underline"),
        pytest.param("x" * 64, id="no digits"),
        pytest.param("\u0661" * 64, id="Arabic digits"),
        pytest.param("frame.jpg", id="a file name"),
    ],
)
def test_other_keys_and_strings_are_not_found(folder, make, key):
    assert make(folder).find(key) is None


@MAKE
def test_keys_with_a_common_prefix_are_distinguished(tmp_path, make):
    """The search uses 16 digits, the comparison all 64."""
    one, other = key_of(1)[:16], "f" * 16
    keys = [begin + digit * 48 for begin in (one, other, "0" * 16) for digit in "05af"]
    entries = {key: entry_of(number) for number, key in enumerate(keys)}
    write(tmp_path, receipt_of(0, dict(list(entries.items())[::2])), receipt_of(1, dict(list(entries.items())[1::2])))
    index = make(tmp_path)
    assert {key: entry for key, (_, entry) in content(index).items()} == entries
    for begin in (one, other, "0" * 16):
        assert index.find(begin + "1" * 48) is None


@MAKE
def test_of_several_shards_with_an_image_the_last_counts(tmp_path, make):
    shared = key_of(0)
    write(
        tmp_path,
        receipt_of(100_000, {shared: entry_of(3)}),
        receipt_of(99_999, {shared: entry_of(2), key_of(1): entry_of(11)}),
        receipt_of(2, {shared: entry_of(1), key_of(2): entry_of(12)}),
    )
    index = make(tmp_path)
    assert content(index) == {
        shared: ("shard-100000", entry_of(3)),
        key_of(1): ("shard-99999", entry_of(11)),
        key_of(2): ("shard-00002", entry_of(12)),
    }
    assert list(index.shards) == ["shard-00002", "shard-99999", "shard-100000"]


@MAKE
def test_failed_images_have_a_reason_unless_another_shard_has_them(tmp_path, make):
    failures = [Failure(f"{number}.jpg", f"reason {number}", retry=number == 1) for number in range(4)]
    write(
        tmp_path,
        receipt_of(0, images_of(0), {key_of(100): failures[0], key_of(101): failures[1], key_of(102): failures[2]}),
        receipt_of(1, {key_of(101): entry_of(101)}, {key_of(102): failures[3], key_of(0): failures[0]}),
    )
    index = make(tmp_path)
    assert index.failed == {key_of(100): failures[0], key_of(102): failures[3]}
    assert index.find(key_of(100)) is None
    assert index.entry(index.find(key_of(101))) == ("shard-00001", entry_of(101))
    assert index.entry(index.find(key_of(0))) == ("shard-00000", entry_of(0))


@MAKE
@pytest.mark.parametrize("with_folder", [False, True])
def test_an_empty_cache_has_an_empty_index(tmp_path, make, with_folder):
    if with_folder:
        (tmp_path / "receipts").mkdir()
    index = make(tmp_path)
    assert (len(index), list(index.keys()), list(index.shards), index.failed) == (0, [], [], {})
    assert index.find(key_of(0)) is None
    assert index.columns["shard_bytes"].sum() == 0


@MAKE
def test_a_shard_without_images_is_listed(tmp_path, make):
    write(tmp_path, receipt_of(0, {}), receipt_of(1, {}, {key_of(0): Failure("a.jpg", "cut short")}))
    index = make(tmp_path)
    assert (len(index), list(index.shards), list(index.failed)) == (0, ["shard-00000", "shard-00001"], [key_of(0)])


def test_receipts_of_another_cache_are_refused_by_name(folder):
    write(folder, replace(RECEIPTS[3], fingerprint="cd" * 32))
    path = receipt_path(folder, RECEIPTS[3].shard)
    with pytest.raises(CacheCorrupt, match=f"^{path} belongs to another cache .{'cd' * 8}.; run: {COMMAND}"):
        Index.open(folder, FINGERPRINT)


def test_an_open_index_does_not_change_when_another_is_written(folder):
    index = from_file(folder)
    write(folder, receipt_of(NUM_SHARDS, images_of(NUM_SHARDS)))
    assert len(from_file(folder)) == len(EXPECTED) + IMAGES_PER_SHARD
    assert content(index) == EXPECTED


def test_the_index_takes_84_bytes_per_image(tmp_path):
    num_images = 10_000
    keys = np.random.default_rng(0).bytes(32 * num_images).hex()
    write(tmp_path, receipt_of(0, {keys[64 * n : 64 * n + 64]: entry_of(n) for n in range(num_images)}))
    write_index(tmp_path, FINGERPRINT)
    assert (tmp_path / INDEX).stat().st_size / num_images == pytest.approx(84, rel=0.02)
    assert (tmp_path / INDEX_CHECKSUM).read_text() == hash_file(tmp_path / INDEX) + "\n"


def test_file_stats_has_only_files_with_the_suffix(tmp_path):
    assert file_stats(tmp_path / "nowhere", ".json") == {}
    for name in ("a.json", "b.json.tmp-1", "json", "c.txt"):
        (tmp_path / name).write_text(name)
    assert {name: stat.st_size for name, stat in file_stats(tmp_path, ".json").items()} == {"a": 6}


def test_file_stats_leaves_out_a_file_that_is_removed_meanwhile(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02d}.json").touch()
        (tmp_path / f"gone-{number}.json").symlink_to(tmp_path / "nowhere")
    assert sorted(file_stats(tmp_path, ".json")) == [f"{number:02d}" for number in range(20)]
