"""The plan: every image in exactly one shard, shards full but not over the limit, nothing ever moved or lost."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.cache.store.manifest import extend_plan, plan_path, read_plan
from lookonce.cache.store.plan import MAX_IMAGES, Plan, PlannedImage, Shard, cut, shard_name
from lookonce.errors import CacheCorrupt

BYTES_PER_TOKEN = 10
IMAGES = st.lists(
    st.builds(
        PlannedImage,
        st.text("0123456789abcdef", min_size=1, max_size=4),
        st.integers(0, 50),
        st.lists(st.text(max_size=8), max_size=3).map(tuple),
    ),
    max_size=30,
    unique_by=lambda image: image.key,
)
LIMIT = st.integers(0, 100)


def extended(plan: Plan, images: list[PlannedImage], max_tokens: int) -> Plan:
    new = plan.extension(images, BYTES_PER_TOKEN, max_tokens * BYTES_PER_TOKEN)
    return replace(plan, shards=plan.shards + new, num_parts=plan.num_parts + 1)


PLANS = st.builds(
    lambda first, second, limit: extended(extended(Plan(), first, limit), second, limit), IMAGES, IMAGES, LIMIT
)

quick = settings(deadline=None, database=None)


def images(*num_tokens: int, prefix: str = "") -> list[PlannedImage]:
    """Images "a", "b", ... of these sizes."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [PlannedImage(prefix + letters[n], size, (f"{letters[n]}.jpg",)) for n, size in enumerate(num_tokens)]


@quick
@given(IMAGES, LIMIT)
def test_cut_keeps_every_image_exactly_once_and_in_order(images, limit):
    assert [image for group in cut(images, limit) for image in group] == images


@quick
@given(IMAGES, LIMIT)
def test_a_group_is_over_the_limit_only_if_it_is_a_single_image(images, limit):
    for group in cut(images, limit):
        assert len(group) == 1 or sum(image.num_tokens for image in group) <= limit


@quick
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
def test_cuts_are_where_the_table_says(sizes, limit, expected):
    assert ["".join(image.key for image in group) for group in cut(images(*sizes), limit)] == expected


@pytest.mark.parametrize(
    ("num_images", "expected"),
    [(MAX_IMAGES, [MAX_IMAGES]), (MAX_IMAGES + 1, [MAX_IMAGES, 1]), (2 * MAX_IMAGES, [MAX_IMAGES, MAX_IMAGES])],
)
def test_a_group_has_no_more_images_than_a_header_has_room_for(num_images, expected):
    groups = cut((PlannedImage(str(number), 0, ()) for number in range(num_images)), 10**9)
    assert [len(group) for group in groups] == expected


@quick
@given(PLANS, IMAGES, LIMIT)
def test_an_extension_holds_its_images_in_their_order_and_is_numbered_on(plan, images, limit):
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
def test_names_have_five_digits_and_more_where_that_is_not_enough(number, name):
    assert shard_name(number) == name


@quick
@given(PLANS)
def test_a_plan_survives_json(plan):
    for shard in plan.shards:
        assert Shard.from_json(json.loads(json.dumps(shard.to_json()))) == shard


def test_a_shard_sums_up_its_images():
    shard = Shard("shard-00000", tuple(images(3, 4)))
    assert (shard.keys, shard.num_tokens) == (["a", "b"], 7)
    assert list(Plan((shard,) * 2).images()) == images(3, 4) * 2


def test_a_folder_without_plan_has_an_empty_one(tmp_path):
    assert read_plan(tmp_path) == Plan()


@quick
@given(parts=st.lists(IMAGES.filter(bool), min_size=1, max_size=4), limit=LIMIT)
def test_a_plan_is_read_as_it_was_extended_part_by_part(tmp_path_factory, parts, limit):
    folder = tmp_path_factory.mktemp("cache")
    plan = Plan()
    for part in parts:
        assert extend_plan(folder, plan, plan.extension(part, BYTES_PER_TOKEN, limit))
        plan = extended(plan, part, limit // BYTES_PER_TOKEN)
        assert read_plan(folder) == plan


def test_parts_stay_as_they_are_when_a_plan_grows(tmp_path):
    extend_plan(tmp_path, Plan(), Plan().extension(images(1, 2), 1, 1))
    before = plan_path(tmp_path, 0).read_bytes()
    plan = read_plan(tmp_path)
    extend_plan(tmp_path, plan, plan.extension(images(3, prefix="more "), 1, 1))
    assert plan_path(tmp_path, 0).read_bytes() == before
    assert [shard.name for shard in read_plan(tmp_path).shards] == ["shard-00000", "shard-00001", "shard-00002"]


def test_of_two_extensions_of_one_plan_one_wins_and_the_other_comes_after_it(tmp_path):
    mine, other = images(1, prefix="mine "), images(1, 2, prefix="other ")
    seen = read_plan(tmp_path)
    assert extend_plan(tmp_path, seen, seen.extension(other, 1, 1))
    assert not extend_plan(tmp_path, seen, seen.extension(mine, 1, 1))
    again = read_plan(tmp_path)
    assert list(again.images()) == other
    assert extend_plan(tmp_path, again, again.extension(mine, 1, 1))
    assert list(read_plan(tmp_path).images()) == other + mine


# Python 3.12 warns of forking with threads about; torch has some, and the children only write.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_many_who_extend_a_plan_at_once_lose_nothing(tmp_path):
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
    assert plan.num_parts == num_processes * num_rounds


@pytest.fixture
def parts(tmp_path):
    """A plan of two parts."""
    for number in range(2):
        plan = read_plan(tmp_path)
        extend_plan(tmp_path, plan, plan.extension(images(1, 2, prefix=str(number)), 1, 1))
    return [plan_path(tmp_path, number) for number in range(2)]


def test_a_part_is_plain_json_with_a_shard_a_line(parts):
    text = parts[1].read_text()
    value = json.loads(text)
    assert value.keys() == {"xxh3_64", "format_version", "shards"}
    assert [shard["name"] for shard in value["shards"]] == ["shard-00002", "shard-00003"]
    for shard in value["shards"]:
        [line] = [line for line in text.splitlines() if shard["name"] in line]
        assert json.loads(line.rstrip(",")) == shard
        assert shard.keys() == {"name", "keys", "num_tokens", "files", "stamps"}


def test_a_flipped_bit_in_a_plan_is_found_wherever_it_is(tmp_path, parts):
    content = parts[1].read_bytes()
    unseen = []
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        parts[1].write_bytes(damaged)
        with contextlib.suppress(CacheCorrupt):
            read_plan(tmp_path)
            unseen.append(place)
    assert unseen == []


@pytest.mark.parametrize("content", ["{", "[]", "", '{"shards": [{"name": "a"}]}', '{"shards": []}'])
@pytest.mark.parametrize("part", [0, 1])
def test_a_plan_that_is_not_what_was_written_is_refused_by_name(tmp_path, parts, content, part):
    parts[part].write_text(content)
    with pytest.raises(CacheCorrupt, match=f"^{parts[part]} is not what was written; run: lookonce cache repair"):
        read_plan(tmp_path)


def test_a_plan_with_columns_of_different_lengths_is_refused():
    value = Shard("shard-00000", tuple(images(3, 4))).to_json()
    for column in ("keys", "num_tokens", "files"):
        with pytest.raises(ValueError):
            Shard.from_json(value | {column: value[column][:1]})


def test_names_that_are_taken_are_not_given_again():
    images = [PlannedImage("a" * 64, 1, ()), PlannedImage("b" * 64, 1, ())]
    added = Plan().extension(images, 1, 1, taken=["shard-00004", "shard-100000"])
    assert [shard.name for shard in added] == ["shard-100001", "shard-100002"]
