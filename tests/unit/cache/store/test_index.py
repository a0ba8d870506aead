"""The index holds exactly the images of the receipts, and one that is damaged or does not match them is never used."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from lookonce.cache.store import metadata
from lookonce.cache.store.metadata import Entry, Failure, Receipt, read_receipt, receipt_path, to_text
from lookonce.cache.store.reader import INDEX, INDEX_CHECKSUM, Index, read_index, write_index
from lookonce.errors import CacheCorrupt

Content = dict[str, tuple[str, Entry]]
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


def from_file(folder: Path) -> Index | None:
    write_index(folder, FINGERPRINT)
    return read_index(folder, FINGERPRINT)


def from_receipts(folder: Path) -> Index:
    return Index.from_receipts(folder, FINGERPRINT)


MAKE = pytest.mark.parametrize("make", [from_file, from_receipts])


def content(index: Index | None) -> Content:
    assert index is not None
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


KEY = key_of(3)
OTHER_KEYS = {
    "unknown": key_of(10**6),
    "lowest": "0" * 64,
    "highest": "f" * 64,
    "empty": "",
    "its first 16 digits": KEY[:16],
    "a byte long": KEY + "00",
    "upper case": KEY.upper(),
    "with a blank": f"{KEY[:32]} {KEY[32:]}",
    "negative": "-" + KEY[1:],
    "a file name": "frame.jpg",
}


@MAKE
def test_other_keys_and_strings_are_not_found(folder, make):
    index = make(folder)
    assert [name for name, key in OTHER_KEYS.items() if index.find(key) is not None] == []


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
        receipt_of(2, {}, {}),
        receipt_of(0, images_of(0), {key_of(100): failures[0], key_of(101): failures[1], key_of(102): failures[2]}),
        receipt_of(1, {key_of(101): entry_of(101)}, {key_of(102): failures[3], key_of(0): failures[0]}),
    )
    index = make(tmp_path)
    assert list(index.shards) == ["shard-00000", "shard-00001", "shard-00002"]  # also one without images
    assert index.failed == {key_of(100): failures[0], key_of(102): failures[3]}
    assert index.find(key_of(100)) is None
    assert index.entry(index.find(key_of(101))) == ("shard-00001", entry_of(101))
    assert index.entry(index.find(key_of(0))) == ("shard-00000", entry_of(0))


def test_receipts_of_another_cache_are_refused_by_name(folder):
    write(folder, replace(RECEIPTS[3], fingerprint="cd" * 32))
    path = receipt_path(folder, RECEIPTS[3].shard)
    with pytest.raises(CacheCorrupt, match=f"^{path} belongs to another cache .{'cd' * 8}.; run: {COMMAND}"):
        Index.open(folder, FINGERPRINT)


@pytest.fixture
def indexed(folder: Path) -> Path:
    """The same with an index file."""
    write_index(folder, FINGERPRINT)
    return folder


def other_images(receipt: Receipt) -> dict[str, Entry]:
    return {f"{number:064x}": entry for number, entry in enumerate(receipt.images.values())}


def add(folder: Path) -> None:
    receipt = read_receipt(folder, "shard-00001")
    write(folder, replace(receipt, shard="shard-00099", images=other_images(receipt)))


def rewrite(folder: Path) -> None:
    receipt = read_receipt(folder, "shard-00001")
    write(folder, replace(receipt, host="other", images=other_images(receipt)))


def replace_with_the_same_time(folder: Path) -> None:
    path = receipt_path(folder, "shard-00001")
    time_ns = path.stat().st_mtime_ns
    write(folder, replace(read_receipt(folder, "shard-00001"), host="another host"))
    os.utime(path, ns=(0, time_ns))


STALE: dict[str, Callable[[Path], object]] = {
    "added": add,
    "removed": lambda folder: receipt_path(folder, "shard-00001").unlink(),
    "rewritten": rewrite,
    "same time": replace_with_the_same_time,
    "touched": lambda folder: os.utime(receipt_path(folder, "shard-00001"), ns=(0, 10**18)),
    "renamed": lambda folder: receipt_path(folder, "shard-00001").rename(receipt_path(folder, "shard-00012")),
}


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_an_index_that_does_not_match_the_receipts_is_not_used(indexed, change):
    assert read_index(indexed, FINGERPRINT) is not None
    change(indexed)
    assert read_index(indexed, FINGERPRINT) is None


def test_a_receipt_that_is_replaced_while_the_index_is_made_makes_it_stale(indexed, monkeypatch):
    def read_and_replace(folder: Path, shard: str) -> Receipt:
        receipt = read_receipt(folder, shard)
        if shard == "shard-00001":
            rewrite(folder)
        return receipt

    monkeypatch.setattr(metadata, "read_receipt", read_and_replace)
    write_index(indexed, FINGERPRINT)
    assert read_index(indexed, FINGERPRINT) is None


@pytest.mark.parametrize("file", [INDEX, INDEX_CHECKSUM])
def test_an_index_with_a_flipped_bit_is_not_used(indexed, file):
    path = indexed / file
    whole = path.read_bytes()
    used = []
    for position in range(0, len(whole), 1 + len(whole) // 400):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        if (index := read_index(indexed, FINGERPRINT)) and content(index) != EXPECTED:
            used.append(position)
    assert used == []
    path.write_bytes(whole)
    assert content(read_index(indexed, FINGERPRINT)) == EXPECTED


def test_the_index_of_another_cache_or_format_version_is_not_used(indexed, monkeypatch):
    assert read_index(indexed, "cd" * 32) is None
    with monkeypatch.context() as other:
        other.setattr("lookonce.cache.store.reader.FORMAT_VERSION", 99)
        write_index(indexed, FINGERPRINT)
    assert read_index(indexed, FINGERPRINT) is None
