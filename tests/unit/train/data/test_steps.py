"""Steps: every example once per epoch, equally many per step, in an order determined by seed and epoch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.data.packing import Group
from lookonce.train.data.sampler import epoch_steps, num_steps

SIZES = st.lists(st.integers(1, 20), max_size=30)
SAMPLES = st.integers(1, 20)
QUESTIONS = st.none() | st.integers(1, 20)
SHUFFLE = st.booleans()
NUM_STAGES = st.integers(1, 4)


def groups_of(sizes: list[int], num_stages: int = 1) -> list[Group]:
    """Groups of these sizes, in turn in each stage.

    Examples are numbered consecutively, and the length of a branch identifies its example.
    """
    numbers = count()
    examples = [tuple(next(numbers) for _ in range(size)) for size in sizes]
    return [
        Group(of, 5, 100 + n, tuple(1000 + number for number in of), n % num_stages) for n, of in enumerate(examples)
    ]


def order(steps: list[list[Group]]) -> list[int]:
    return [number for step in steps for group in step for number in group.examples]


def sizes(steps: list[list[Group]]) -> list[int]:
    return [sum(len(group.examples) for group in step) for step in steps]


@pytest.mark.guarantee("Every record is trained on once an epoch.")
@pytest.mark.guarantee("Every step has exactly the configured number of samples, except for the last one of an epoch.")
@pytest.mark.guarantee(
    "With `batch.order` by a metadata field, an epoch goes through the values of the field in order, in every "
    "batch mode."
)
@given(SIZES, SAMPLES, QUESTIONS, SHUFFLE, NUM_STAGES)
def test_every_example_comes_once_in_steps_of_equal_size_and_stage_after_stage(
    of_sizes, samples, questions, shuffle, num_stages
):
    groups = groups_of(of_sizes, num_stages)
    whole = {number: group for group in groups for number in group.examples}
    steps = epoch_steps(groups, samples, questions, 0, 0, shuffle=shuffle)
    assert sorted(order(steps)) == sorted(whole)
    for part in (part for step in steps for part in step):
        [group] = {whole[number] for number in part.examples}
        assert part == group.subset([group.examples.index(number) for number in part.examples])
    assert all(len({part.num_prefix_tokens for part in step}) == len(step) for step in steps), "a prefix comes once"
    assert len(steps) == num_steps(sum(of_sizes), samples)
    assert sizes(steps)[:-1] == [samples] * (len(steps) - 1)
    stages = [group.stage for step in steps for group in step]
    assert not shuffle or stages == sorted(stages)


@pytest.mark.guarantee(
    "With `batch.order: as_given`, each step has the next records of the files, in every batch mode."
)
@given(SIZES, SAMPLES, st.randoms(use_true_random=False))
def test_without_shuffling_each_step_has_the_next_examples_whatever_their_images(of_sizes, samples, rng):
    """The questions of an image used to move forward to its first one."""
    examples = list(range(sum(of_sizes)))
    rng.shuffle(examples)
    scattered = [sorted(examples.pop() for _ in range(size)) for size in of_sizes]
    groups = [Group(tuple(of), 5, 100, tuple(1000 + number for number in of)) for of in scattered]
    steps = epoch_steps(groups, samples, None, 0, 0, shuffle=False)
    for number, step in enumerate(steps):
        start = number * samples
        assert sorted(order([step])) == list(range(sum(of_sizes)))[start : start + samples]


def test_another_seed_or_epoch_is_another_order():
    groups = groups_of([5] * 20)
    orders = [
        order(epoch_steps(groups, 8, 2, seed, epoch)) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (11, 0)]
    ]
    assert len(set(map(tuple, orders))) == len(orders)


def test_the_order_is_the_same_in_every_process():
    steps = epoch_steps(groups_of([3, 1, 2]), 2, None, 7, 1)
    assert [[group.examples for group in step] for step in steps] == [[(1, 2)], [(0,), (3,)], [(4, 5)]]


@given(SIZES, SAMPLES, QUESTIONS, st.randoms(use_true_random=False))
def test_the_order_of_examples_in_their_groups_does_not_matter(of_sizes, samples, questions, rng):
    groups = groups_of(of_sizes)
    others = []
    for group in groups:
        examples = rng.sample(group.examples, len(group.examples))
        others.append(
            replace(group, examples=tuple(examples), branch_tokens=tuple(1000 + number for number in examples))
        )
    expected, found = (epoch_steps(some, samples, questions, 7, 1) for some in (groups, others))
    assert [set(order([step])) for step in found] == [set(order([step])) for step in expected]


def test_one_question_per_image_gives_all_orders_about_equally_often():
    groups, num_epochs = groups_of([2, 1, 1]), 2400
    found = Counter(tuple(order(epoch_steps(groups, 1, 1, 0, epoch))) for epoch in range(num_epochs))
    assert set(found) == set(permutations(range(4)))
    assert 60 < min(found.values()) and max(found.values()) < 140
