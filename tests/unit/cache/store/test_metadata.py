"""Receipts and plan: read as written, no changed byte goes undetected, no image is moved or lost."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import CHARACTERS, TEXT

from lookonce.cache.store.metadata import (
    MAX_IMAGES,
    PLAN,
    Entry,
    Failure,
    Plan,
    PlannedImage,
    Receipt,
    Shard,
    checksum_line,
    cut,
    extend_plan,
    finished_shards,
    plan_path,
    plan_text,
    read_plan,
    read_receipt,
    read_receipts,
    receipt_path,
    to_text,
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

NUMBERS = st.integers(0, 2**63 - 1)
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


@given(RECEIPTS)
def test_any_receipt_is_the_same_after_a_round_trip_through_its_file(tmp_path_factory, receipt):
    folder = tmp_path_factory.mktemp("cache")
    put(folder, receipt.shard, to_text(receipt))
    assert read_receipt(folder, receipt.shard) == receipt


def test_the_text_of_a_receipt_does_not_drift():
    digest = sha256(to_text(RECEIPT).encode()).hexdigest()
    assert digest == "ada412d50d4b1d721b3c09f95a758f727014b8352405a2352afe2387df3490a4"


DAMAGE = {
    "empty": lambda content: b"",
    "without its end": lambda content: content[:-1],
    "half its first line": lambda content: content[:20],
    "longer": lambda content: content + b"\n",
    "written again": lambda content: json.dumps(json.loads(content), indent=2).encode(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_receipt_is_refused_by_name(tmp_path, damage):
    path = put(tmp_path, RECEIPT.shard, damage(to_text(RECEIPT).encode()))
    with pytest.raises(CacheCorrupt, match=f"^{path} is damaged .wrong checksum.; run: {COMMAND}"):
        read_receipt(tmp_path, RECEIPT.shard)


def test_a_receipt_under_another_shards_name_is_refused_with_both(tmp_path):
    path = put(tmp_path, "shard-00008", to_text(RECEIPT))
    with pytest.raises(CacheCorrupt, match=f"^{path} belongs to shard-00007; run: {COMMAND}"):
        read_receipt(tmp_path, "shard-00008")


def test_finished_shards_come_in_the_order_of_their_numbers(tmp_path):
    in_order = ["shard-00002", "shard-00010", "shard-99999", "shard-100000", "shard-123456", "shard-1000000"]
    for shard in sorted(in_order):
        put(tmp_path, shard, to_text(replace(RECEIPT, shard=shard)))
    assert finished_shards(tmp_path) == in_order
    assert [receipt.shard for receipt in read_receipts(tmp_path)] == in_order


def test_only_receipts_count_as_finished_shards(tmp_path):
    assert finished_shards(tmp_path) == [] == list(read_receipts(tmp_path))
    with pytest.raises(FileNotFoundError):
        read_receipt(tmp_path, "shard-00000")
    put(tmp_path, "shard-00000", "{}")
    (tmp_path / "receipts" / f"shard-00001.json{TEMPORARY_MARK}host-1-abcdef01").touch()
    (tmp_path / "receipts" / "notes.txt").touch()
    assert finished_shards(tmp_path) == ["shard-00000"]


BYTES_PER_TOKEN = 10
IMAGES = st.lists(
    st.builds(
        PlannedImage,
        st.text("0123456789abcdef", min_size=1, max_size=4),
        st.integers(0, 50),
        st.lists(st.text(CHARACTERS, max_size=8), max_size=3).map(tuple),
    ),
    max_size=15,
    unique_by=lambda image: image.key,
)
LIMIT = st.integers(0, 100)


def extended(plan: Plan, images: list[PlannedImage], max_tokens: int) -> Plan:
    return plan.extended(plan.extension(images, BYTES_PER_TOKEN, max_tokens * BYTES_PER_TOKEN))


PLANS = st.builds(
    lambda first, second, limit: extended(extended(Plan(), first, limit), second, limit), IMAGES, IMAGES, LIMIT
)


def images(*num_tokens: int, prefix: str = "") -> list[PlannedImage]:
    """Images "a", "b", ... of these sizes."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [PlannedImage(prefix + letters[n], size, (f"{letters[n]}.jpg",)) for n, size in enumerate(num_tokens)]


@given(IMAGES, LIMIT)
def test_groups_have_each_image_once_in_order_and_are_full_and_not_over_the_limit(images, limit):
    groups = cut(images, limit)
    assert [image for group in groups for image in group] == images
    sums = [sum(image.num_tokens for image in group) for group in groups]
    assert all(num_tokens <= limit or len(group) == 1 for num_tokens, group in zip(sums, groups, strict=True))
    assert all(num_tokens + group[0].num_tokens > limit for num_tokens, group in zip(sums, groups[1:], strict=False))


@pytest.mark.parametrize(
    ("num_images", "expected"),
    [(MAX_IMAGES, [MAX_IMAGES]), (MAX_IMAGES + 1, [MAX_IMAGES, 1]), (2 * MAX_IMAGES, [MAX_IMAGES, MAX_IMAGES])],
)
def test_a_group_has_at_most_max_images(num_images, expected):
    groups = cut((PlannedImage(str(number), 0, ()) for number in range(num_images)), 10**9)
    assert [len(group) for group in groups] == expected


@given(PLANS, IMAGES, LIMIT)
def test_an_extension_keeps_the_order_of_its_images_and_continues_the_numbers(plan, images, limit):
    new = plan.extension(images, BYTES_PER_TOKEN, limit * BYTES_PER_TOKEN)
    assert [image for shard in new for image in shard.images] == images
    first = len(plan.shards)
    assert [shard.name for shard in new] == [f"shard-{first + number:05d}" for number in range(len(new))]


@given(batches=st.lists(IMAGES.filter(bool), min_size=1, max_size=4), limit=LIMIT)
def test_a_plan_is_read_as_it_was_extended(tmp_path_factory, batches, limit):
    folder = tmp_path_factory.mktemp("cache")
    plan = Plan()
    assert read_plan(folder) == plan
    for batch in batches:
        assert extend_plan(folder, plan, plan.extension(batch, BYTES_PER_TOKEN, limit))
        plan = extended(plan, batch, limit // BYTES_PER_TOKEN)
        assert read_plan(folder) == plan


@pytest.fixture
def plan_files(tmp_path):
    """The files of a plan that was extended once."""
    for number in range(2):
        plan = read_plan(tmp_path)
        extend_plan(tmp_path, plan, plan.extension(images(1, 2, prefix=str(number)), 1, 1))
    return [plan_path(tmp_path, number) for number in range(2)]


def test_a_plan_file_is_plain_json_with_one_shard_per_line(plan_files):
    text = plan_files[1].read_text()
    value = json.loads(text)
    assert value.keys() == {"xxh3_64", "format_version", "shards"}
    assert [shard["name"] for shard in value["shards"]] == ["shard-00002", "shard-00003"]
    for shard in value["shards"]:
        [line] = [line for line in text.splitlines() if shard["name"] in line]
        assert json.loads(line.rstrip(",")) == shard
        assert shard.keys() == {"name", "keys", "num_tokens", "files", "stamps"}


@pytest.mark.parametrize("content", ["", '{"shards": []}'])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_plan_file_is_refused_by_name(tmp_path, plan_files, content, number):
    plan_files[number].write_text(content)
    with pytest.raises(
        CacheCorrupt, match=f"^{plan_files[number]} is damaged .wrong checksum.; run: lookonce cache repair"
    ):
        read_plan(tmp_path)


def test_a_plan_with_columns_of_different_lengths_is_refused(tmp_path):
    value = json.loads(plan_text([Shard("shard-00000", tuple(images(3, 4)))]))
    [shard] = value["shards"]
    for column in ("keys", "num_tokens", "files", "stamps"):
        body = json.dumps({"shards": [shard | {column: shard[column][:1]}]})[1:]
        (tmp_path / PLAN).write_text(checksum_line(body.encode()) + body)
        with pytest.raises(CacheCorrupt, match="is broken"):
            read_plan(tmp_path)


def test_taken_names_are_not_used_again():
    images = [PlannedImage("a" * 64, 1, ()), PlannedImage("b" * 64, 1, ())]
    added = Plan().extension(images, 1, 1, taken=["shard-00004", "shard-100000"])
    assert [shard.name for shard in added] == ["shard-100001", "shard-100002"]


def test_files_found_again_are_read_back_and_the_last_entry_about_a_file_counts(tmp_path):
    first = (
        PlannedImage("k1", 4, ("a.png", "b.png"), ((1, 1, 1), None)),
        PlannedImage("k2", 4, ("c.png",), ((2, 2, 2),)),
    )
    again = (PlannedImage("k2", 4, ("a.png",), ((2, 3, 3),)), PlannedImage("k1", 4, ("d.png",), ((1, 5, 5),)))
    plan = Plan()
    shards = plan.extension(first, 1, 100)
    assert extend_plan(tmp_path, plan, shards)
    assert extend_plan(tmp_path, read_plan(tmp_path), (), again)
    plan = read_plan(tmp_path)
    assert plan == Plan().extended(shards).extended((), again)
    assert plan.files() == {
        "a.png": ("k2", (2, 3, 3)),
        "b.png": ("k1", None),
        "c.png": ("k2", (2, 2, 2)),
        "d.png": ("k1", (1, 5, 5)),
    }
    assert plan.images == (*first, *again)
