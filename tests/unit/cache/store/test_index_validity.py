"""An index file that is damaged or does not match the receipts is never used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.store import metadata
from lookonce.cache.store.metadata import Entry, Receipt, read_receipt, receipt_path, to_text
from lookonce.cache.store.reader import INDEX, INDEX_CHECKSUM, Index, read_index, write_index

Content = dict[str, tuple[str, Entry]]


def content(index: Index | None) -> Content:
    assert index is not None
    return {key: index.entry(index.find(key)) for key in index.keys()}


class Indexed:
    """A cache of two shards with an index file."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self.fingerprint = folder, fingerprint
        write_index(folder, fingerprint)
        self.content = self.from_receipts()

    def open(self) -> Content:
        return content(Index.open(self.folder, self.fingerprint))

    def from_receipts(self) -> Content:
        return content(Index.from_receipts(self.folder, self.fingerprint))

    def read(self) -> Index | None:
        return read_index(self.folder, self.fingerprint)


@pytest.fixture
def indexed(small) -> Indexed:
    return Indexed(small.folder, small.fingerprint.sha256)


def write(folder: Path, receipt: Receipt) -> None:
    receipt_path(folder, receipt.shard).write_text(to_text(receipt))


def other_images(receipt: Receipt) -> dict[str, Entry]:
    return {f"{number:064x}": entry for number, entry in enumerate(receipt.images.values())}


def add(folder: Path) -> None:
    receipt = read_receipt(folder, "shard-00001")
    write(folder, replace(receipt, shard="shard-00002", images=other_images(receipt)))


def rewrite(folder: Path) -> None:
    receipt = read_receipt(folder, "shard-00001")
    write(folder, replace(receipt, host="other", images=other_images(receipt)))


def replace_by_one_of_the_same_size(folder: Path) -> None:
    path, receipt = receipt_path(folder, "shard-00001"), read_receipt(folder, "shard-00001")
    write(folder, replace(receipt, host=receipt.host[::-1]))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def replace_with_the_same_time(folder: Path) -> None:
    path = receipt_path(folder, "shard-00001")
    time_ns = path.stat().st_mtime_ns
    write(folder, replace(read_receipt(folder, "shard-00001"), host="another host"))
    os.utime(path, ns=(0, time_ns))


def touch(folder: Path) -> None:
    os.utime(receipt_path(folder, "shard-00001"), ns=(0, 10**18))


def rename(folder: Path) -> None:
    receipt_path(folder, "shard-00001").rename(receipt_path(folder, "shard-00012"))


STALE: dict[str, Callable[[Path], object]] = {
    "added": add,
    "removed": lambda folder: receipt_path(folder, "shard-00001").unlink(),
    "none left": lambda folder: [path.unlink() for path in (folder / "receipts").iterdir()],
    "rewritten": rewrite,
    "same size": replace_by_one_of_the_same_size,
    "same time": replace_with_the_same_time,
    "touched": touch,
    "renamed": rename,
}
READABLE = [name for name in STALE if name not in ("touched", "renamed")]


@pytest.mark.parametrize("change", STALE.values(), ids=STALE)
def test_an_index_that_does_not_match_the_receipts_is_not_used(indexed, change):
    assert indexed.read() is not None
    change(indexed.folder)
    assert indexed.read() is None


@pytest.mark.parametrize("change", READABLE)
def test_opening_a_cache_with_a_stale_index_reads_the_receipts(indexed, change):
    STALE[change](indexed.folder)
    expected = indexed.from_receipts()
    assert indexed.open() == expected
    write_index(indexed.folder, indexed.fingerprint)
    assert content(indexed.read()) == expected


def test_a_receipt_that_is_replaced_while_the_index_is_made_makes_it_stale(indexed, monkeypatch):
    def read_and_replace(folder: Path, shard: str) -> Receipt:
        receipt = read_receipt(folder, shard)
        if shard == "shard-00001":
            rewrite(folder)
        return receipt

    monkeypatch.setattr(metadata, "read_receipt", read_and_replace)
    write_index(indexed.folder, indexed.fingerprint)
    assert indexed.read() is None


def test_other_files_beside_the_receipts_do_not_matter(indexed):
    for name in ("shard-00007.json.tmp-host-1-abcdef01", "notes.txt"):
        (indexed.folder / "receipts" / name).touch()
    assert content(indexed.read()) == indexed.content


@pytest.mark.parametrize("file", [INDEX, INDEX_CHECKSUM])
def test_an_index_with_a_flipped_bit_is_not_used(indexed, file):
    path = indexed.folder / file
    whole = path.read_bytes()
    used = []
    for position in range(0, len(whole), 1 + len(whole) // 400):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        if (index := indexed.read()) and content(index) != indexed.content:
            used.append(position)
    assert used == []
    path.write_bytes(whole)
    assert content(indexed.read()) == indexed.content


@pytest.mark.parametrize("num_bytes", [0, 1, 8, 100, -1])
def test_a_truncated_index_is_not_used(indexed, num_bytes):
    path = indexed.folder / INDEX
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert indexed.open() == indexed.content
    assert indexed.read() is None


@pytest.mark.parametrize("file", [INDEX, INDEX_CHECKSUM])
def test_the_index_may_be_deleted(indexed, file):
    (indexed.folder / file).unlink()
    assert indexed.open() == indexed.content


def test_the_index_of_another_cache_is_not_used(indexed):
    assert read_index(indexed.folder, "cd" * 32) is None


def test_the_index_of_another_format_version_is_not_used(indexed, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr("lookonce.cache.store.reader.FORMAT_VERSION", 99)
        write_index(indexed.folder, indexed.fingerprint)
    assert indexed.read() is None
