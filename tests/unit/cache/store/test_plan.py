"""The plan: every image in exactly one shard, shards full but not over the limit, no image moved or lost."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import CHARACTERS

from lookonce.cache.store.metadata import (
    MAX_IMAGES,
    PLAN,
    Plan,
    PlannedImage,
    Shard,
    checksum_line,
    cut,
    extend_plan,
    plan_path,
    plan_text,
    read_plan,
    shard_name,
)
from lookonce.errors import CacheCorrupt

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
def test_cut_keeps_every_image_exactly_once_and_in_order(images, limit):
    assert [image for group in cut(images, limit) for image in group] == images


@given(IMAGES, LIMIT)
def test_a_group_is_over_the_limit_only_if_it_is_a_single_image(images, limit):
    for group in cut(images, limit):
        assert len(group) == 1 or sum(image.num_tokens for image in group) <= limit


@given(IMAGES, LIMIT)
def test_no_group_had_room_for_the_first_image_of_the_next(images, limit):
    for group, following in pairwise(cut(images, limit)):
        assert sum(image.num_tokens for image in group) + following[0].num_tokens > limit


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 10, []),
        ([4, 6], 10, ["ab"]),
        ([4, 7], 10, ["a", "b"]),
        ([99, 1, 99], 10, ["a", "b", "c"]),
        ([0, 0, 10, 0], 10, ["abcd"]),
        ([10, 0, 1], 10, ["ab", "c"]),
        ([1, 0, 2], 0, ["a", "b", "c"]),
    ],
)
def test_images_are_cut_into_the_expected_groups(sizes, limit, expected):
    assert ["".join(image.key for image in group) for group in cut(images(*sizes), limit)] == expected


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


@pytest.mark.parametrize(
    ("shard_bytes", "num_shards"), [(10_000, 3), (29_999, 3), (30_000, 2), (89_999, 2), (90_000, 1), (5, 3)]
)
def test_shards_are_cut_by_bytes(shard_bytes, num_shards):
    assert len(Plan().extension(images(10, 20, 60), 1000, shard_bytes)) == num_shards


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "shard-00000"), (99_999, "shard-99999"), (100_000, "shard-100000"), (10**7, "shard-10000000")],
)
def test_shard_names_have_at_least_five_digits(number, name):
    assert shard_name(number) == name


def test_a_shard_sums_up_its_images():
    shard = Shard("shard-00000", tuple(images(3, 4)))
    assert (shard.keys, shard.num_tokens) == (["a", "b"], 7)
    assert list(Plan((shard,) * 2).images()) == images(3, 4) * 2


def test_a_folder_without_plan_has_an_empty_one(tmp_path):
    assert read_plan(tmp_path) == Plan()


@given(batches=st.lists(IMAGES.filter(bool), min_size=1, max_size=4), limit=LIMIT)
def test_a_plan_is_read_as_it_was_extended(tmp_path_factory, batches, limit):
    folder = tmp_path_factory.mktemp("cache")
    plan = Plan()
    for batch in batches:
        assert extend_plan(folder, plan, plan.extension(batch, BYTES_PER_TOKEN, limit))
        plan = extended(plan, batch, limit // BYTES_PER_TOKEN)
        assert read_plan(folder) == plan


def test_plan_files_do_not_change_when_a_plan_is_extended(tmp_path):
    extend_plan(tmp_path, Plan(), Plan().extension(images(1, 2), 1, 1))
    before = plan_path(tmp_path, 0).read_bytes()
    plan = read_plan(tmp_path)
    extend_plan(tmp_path, plan, plan.extension(images(3, prefix="more "), 1, 1))
    assert plan_path(tmp_path, 0).read_bytes() == before
    assert [shard.name for shard in read_plan(tmp_path).shards] == ["shard-00000", "shard-00001", "shard-00002"]


def test_of_two_concurrent_extensions_one_succeeds_and_the_other_is_repeated(tmp_path):
    mine, other = images(1, prefix="mine "), images(1, 2, prefix="other ")
    seen = read_plan(tmp_path)
    assert extend_plan(tmp_path, seen, seen.extension(other, 1, 1))
    assert not extend_plan(tmp_path, seen, seen.extension(mine, 1, 1))
    again = read_plan(tmp_path)
    assert list(again.images()) == other
    assert extend_plan(tmp_path, again, again.extension(mine, 1, 1))
    assert list(read_plan(tmp_path).images()) == other + mine


# Python 3.12 warns when a process with threads forks; torch has some, and the children only write.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_many_processes_that_extend_a_plan_lose_nothing(tmp_path):
    num_processes, num_rounds = 4, 5
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(num_processes)

    def extend(process: int) -> None:
        for number in range(num_rounds):
            barrier.wait(timeout=60)
            mine = images(1, 1, prefix=f"{process}-{number}-")
            while not extend_plan(tmp_path, plan := read_plan(tmp_path), plan.extension(mine, 1, 1)):
                pass

    processes = [context.Process(target=extend, args=(process,)) for process in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    plan = read_plan(tmp_path)
    expected = {f"{p}-{n}-{letter}" for p in range(num_processes) for n in range(num_rounds) for letter in "ab"}
    assert sorted(image.key for image in plan.images()) == sorted(expected)
    assert [shard.name for shard in plan.shards] == [shard_name(number) for number in range(len(expected))]
    assert plan.num_files == num_processes * num_rounds


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


def test_every_flipped_bit_in_a_plan_is_detected(tmp_path, plan_files):
    content = plan_files[1].read_bytes()
    undetected = []
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        plan_files[1].write_bytes(damaged)
        with contextlib.suppress(CacheCorrupt):
            read_plan(tmp_path)
            undetected.append(position)
    assert undetected == []


@pytest.mark.parametrize("content", ["{", "[]", "", '{"shards": [{"name": "a"}]}', '{"shards": []}'])
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
    assert [image.key for image in plan.images()] == ["k1", "k2"]
