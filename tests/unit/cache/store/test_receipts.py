"""Receipts: what a finished shard holds; no changed byte in one goes undetected."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import TEXT

from lookonce.cache.format import FORMAT_VERSION
from lookonce.cache.store import metadata
from lookonce.cache.store.metadata import (
    Entry,
    Failure,
    Receipt,
    finished_shards,
    has_receipt,
    read_receipt,
    read_receipts,
    receipt_path,
    to_text,
    write_receipt,
)
from lookonce.errors import CacheCorrupt
from lookonce.files import TEMPORARY_MARK

COMMAND = "lookonce cache repair"
KEYS = [sha256(bytes([number])).hexdigest() for number in range(4)]
RECEIPT = Receipt(
    shard="shard-00007",
    fingerprint="ab" * 32,
    size_bytes=8192,
    header_bytes=4096,
    header_xxh3_64="0123456789abcdef",
    host="node-3",
    finished=1_700_000_000.125,
    seconds=12.5,
    images={
        KEYS[0]: Entry(4096, 2048, 4, (1, 4, 4), "00000000000000ff", (1.5, 0.25), (3.0, 1e-7)),
        KEYS[1]: Entry(6144, 2048, 4, (1, 2, 8), "ffffffffffffffff", (0.1, 0.2), (1.0, 2.0)),
    },
    failed={KEYS[2]: Failure("Où.jpg", 'it is "broken"\n', retry=True), KEYS[3]: Failure("b.tar/c.png", "cut short")},
)

NUMBERS = st.integers(0, 2**63)
FLOATS = st.floats(allow_nan=False)
FLOAT_TUPLES = st.lists(FLOATS, max_size=4).map(tuple)
SIZES = st.integers(0, 2**32 - 1)
CHECKSUMS = st.integers(0, 2**64 - 1).map("{:016x}".format)
ENTRIES = st.builds(Entry, NUMBERS, NUMBERS, SIZES, st.tuples(SIZES, SIZES, SIZES), CHECKSUMS, FLOAT_TUPLES)
RECEIPTS = st.builds(
    Receipt,
    *(st.just("shard-00007"), TEXT, NUMBERS, NUMBERS, TEXT, TEXT, FLOATS, FLOATS),
    images=st.dictionaries(st.sampled_from(KEYS), ENTRIES),
    failed=st.dictionaries(TEXT, st.builds(Failure, TEXT, TEXT, st.booleans())),
)


def put(folder: Path, shard: str, content: bytes | str) -> Path:
    path = receipt_path(folder, shard)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_receipt_is_read_as_it_was_written(tmp_path):
    assert not has_receipt(tmp_path, RECEIPT.shard)
    assert write_receipt(tmp_path, RECEIPT)
    assert has_receipt(tmp_path, RECEIPT.shard)
    assert read_receipt(tmp_path, RECEIPT.shard) == RECEIPT


@given(RECEIPTS)
def test_any_receipt_is_the_same_after_a_round_trip_through_its_file(tmp_path_factory, receipt):
    folder = tmp_path_factory.mktemp("cache")
    put(folder, receipt.shard, to_text(receipt))
    assert read_receipt(folder, receipt.shard) == receipt


def test_of_two_receipts_of_a_shard_the_first_stays(tmp_path):
    write_receipt(tmp_path, RECEIPT)
    assert not write_receipt(tmp_path, replace(RECEIPT, host="node-4"))
    assert read_receipt(tmp_path, RECEIPT.shard) == RECEIPT


def test_a_receipt_is_plain_json_with_all_fields(tmp_path):
    value = json.loads(to_text(RECEIPT))
    assert len(value.pop("xxh3_64")) == 16
    assert value.pop("format_version") == FORMAT_VERSION
    assert value == json.loads(json.dumps(asdict(RECEIPT)))


def test_each_image_and_each_failure_has_a_line_of_its_own():
    text = to_text(RECEIPT)
    assert text.startswith('{\n  "xxh3_64": "') and text.endswith("}\n") and text.isascii()
    for key in KEYS:
        [line] = [line for line in text.splitlines() if key in line]
        value = json.loads("{" + line.rstrip(",") + "}")
        assert value.keys() == {key}


def test_the_text_of_a_receipt_does_not_drift():
    digest = sha256(to_text(RECEIPT).encode()).hexdigest()
    assert digest == "ada412d50d4b1d721b3c09f95a758f727014b8352405a2352afe2387df3490a4"


def test_every_flipped_bit_is_detected(tmp_path):
    content = to_text(RECEIPT).encode()
    path = put(tmp_path, RECEIPT.shard, content)
    undetected = []
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with contextlib.suppress(CacheCorrupt):
            read_receipt(tmp_path, RECEIPT.shard)
            undetected.append(position)
    assert undetected == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:-1], id="without its end"),
        pytest.param(lambda content: content[:40], id="its first line"),
        pytest.param(lambda content: content[:20], id="half its first line"),
        pytest.param(lambda content: content + b"\n", id="longer"),
        pytest.param(lambda content: content + content, id="twice"),
        pytest.param(lambda content: b"\xff\xfe" + content, id="not UTF-8"),
        pytest.param(lambda content: b"[]", id="other JSON"),
        pytest.param(lambda content: bytes(len(content)), id="zeros"),
        pytest.param(lambda content: content.replace(b"\n", b"\r\n"), id="other line ends"),
        pytest.param(lambda content: json.dumps(json.loads(content), indent=2).encode(), id="written again"),
    ],
)
def test_a_damaged_receipt_is_refused_by_name(tmp_path, damage):
    path = put(tmp_path, RECEIPT.shard, damage(to_text(RECEIPT).encode()))
    with pytest.raises(CacheCorrupt, match=f"^{path} is damaged .wrong checksum.; run: {COMMAND}"):
        read_receipt(tmp_path, RECEIPT.shard)


def test_a_receipt_under_another_shards_name_is_refused_with_both(tmp_path):
    path = put(tmp_path, "shard-00008", to_text(RECEIPT))
    with pytest.raises(CacheCorrupt, match=f"^{path} belongs to shard-00007; run: {COMMAND}"):
        read_receipt(tmp_path, "shard-00008")


def test_reading_a_missing_receipt_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_receipt(tmp_path, "shard-00000")


def test_finished_shards_come_in_the_order_of_their_numbers(tmp_path):
    in_order = ["shard-00002", "shard-00010", "shard-99999", "shard-100000", "shard-123456", "shard-1000000"]
    for shard in sorted(in_order):
        put(tmp_path, shard, to_text(replace(RECEIPT, shard=shard)))
    assert finished_shards(tmp_path) == in_order
    assert [receipt.shard for receipt in read_receipts(tmp_path)] == in_order


def test_only_receipts_count_as_finished_shards(tmp_path):
    put(tmp_path, "shard-00000", "{}")
    (tmp_path / "receipts" / f"shard-00001.json{TEMPORARY_MARK}host-1-abcdef01").touch()
    (tmp_path / "receipts" / "notes.txt").touch()
    assert finished_shards(tmp_path) == ["shard-00000"]


def test_a_cache_without_receipts_has_no_finished_shards(tmp_path):
    assert finished_shards(tmp_path) == [] == list(read_receipts(tmp_path))


def test_only_a_few_receipts_are_read_ahead(tmp_path, monkeypatch):
    read = []

    def count_and_read(folder: Path, shard: str) -> Receipt:
        read.append(shard)
        return read_receipt(folder, shard)

    monkeypatch.setattr(metadata, "read_receipt", count_and_read)
    for number in range(200):
        put(tmp_path, f"shard-{number:05d}", to_text(replace(RECEIPT, shard=f"shard-{number:05d}")))
    some = list(islice(read_receipts(tmp_path), 3))
    assert [receipt.shard for receipt in some] == ["shard-00000", "shard-00001", "shard-00002"]
    assert len(read) < 50


def test_a_broken_receipt_is_an_error_and_not_skipped(tmp_path):
    for number in range(3):
        put(tmp_path, f"shard-{number:05d}", to_text(replace(RECEIPT, shard=f"shard-{number:05d}")))
    put(tmp_path, "shard-00001", "{}")
    with pytest.raises(CacheCorrupt, match="shard-00001"):
        list(read_receipts(tmp_path))
