"""The plan: every image in exactly one shard, shards full but not over the limit, nothing ever moved."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.cache.plan import Plan, Shard, cut

KEYS = st.text("0123456789abcdef", min_size=1, max_size=4)
SIZES = st.dictionaries(KEYS, st.integers(0, 50), max_size=30)
LIMIT = st.integers(1, 100)
PLANS = st.builds(
    lambda first, second, limit: Plan().extended(first, limit).extended(second, limit), SIZES, SIZES, LIMIT
)

quick = settings(deadline=None, database=None)


@quick
@given(SIZES, LIMIT, st.randoms())
def test_cut_keeps_every_key_exactly_once_and_in_order(size_of, limit, random):
    keys = list(size_of)
    random.shuffle(keys)
    assert [key for group in cut(keys, size_of, limit) for key in group] == keys


@quick
@given(SIZES, LIMIT)
def test_a_group_is_over_the_limit_only_if_it_is_a_single_key(size_of, limit):
    for group in cut(size_of, size_of, limit):
        assert len(group) == 1 or sum(size_of[key] for key in group) <= limit


@quick
@given(SIZES, LIMIT)
def test_no_group_had_room_for_the_first_key_of_the_next(size_of, limit):
    for group, following in pairwise(cut(size_of, size_of, limit)):
        assert sum(size_of[key] for key in group) + size_of[following[0]] > limit


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 10, []),
        ([4, 6], 10, ["ab"]),
        ([4, 7], 10, ["a", "b"]),
        ([99, 1, 99], 10, ["a", "b", "c"]),
        ([0, 0, 10, 0], 10, ["abcd"]),
        ([10, 0, 1], 10, ["ab", "c"]),
    ],
)
def test_cuts_are_where_the_table_says(sizes, limit, expected):
    size_of = dict(zip("abcd", sizes, strict=False))
    assert cut(size_of, size_of, limit) == [tuple(group) for group in expected]


@quick
@given(PLANS, SIZES, LIMIT)
def test_extending_never_changes_the_shards_there_are(plan, size_of, limit):
    extended = plan.extended(size_of, limit)
    assert extended.shards[: len(plan.shards)] == plan.shards
    added = extended.shards[len(plan.shards) :]
    assert [key for shard in added for key in shard.keys] == sorted(size_of)


@quick
@given(PLANS)
def test_names_are_consecutive(plan):
    assert [shard.name for shard in plan.shards] == [f"shard-{number:05d}" for number in range(len(plan.shards))]


@quick
@given(PLANS)
def test_a_plan_survives_json(plan):
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@quick
@given(SIZES, LIMIT, st.randoms())
def test_the_same_images_in_any_order_give_the_same_plan(size_of, limit, random):
    items = list(size_of.items())
    random.shuffle(items)
    assert Plan().extended(dict(items), limit) == Plan().extended(size_of, limit)


def test_extending_by_nothing_adds_no_shard():
    plan = Plan((Shard("shard-00000", ("a",)),))
    assert plan.extended({}, 1) == plan
