"""The order of a run: the same steps in every mode and on any number of ranks, each of which weighs 1 in all."""

from __future__ import annotations

from collections import Counter
from itertools import chain, count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.run.config import BatchSection
from lookonce.train.data.sampler import ENOUGH_PACKS, Forward, Order
from lookonce.train.data.tokenize import Example

quick = settings(deadline=None, database=None, max_examples=50)
START, IMAGE, END = 97, 98, 99
TOKENS_OF = {"a": 20, "b": 35, "c": 50}
TOKENS_PER_PACK = 100
MODES = ("shared", "packed", "separate")
NUM_EPOCHS = 3


def example(key: str, number: int, len_answer: int) -> Example:
    """A question of its own about an image, or about none."""
    images = [START, IMAGE, END] if key else []
    tokens = [*images, number, *range(len_answer)]
    supervised = np.arange(len(tokens)) >= len(tokens) - len_answer
    return Example(np.array(tokens, np.int32), supervised, tuple(key), tuple(TOKENS_OF[k] for k in key), "")


def examples_of(asked: list[tuple[str, int]]) -> list[Example]:
    numbers = count(100)
    return [example(key, next(numbers), len_answer) for key, len_answer in asked]


EXAMPLES = st.lists(
    st.tuples(st.sampled_from(["a", "a", "b", "c", ""]), st.integers(1, 5)), min_size=1, max_size=30
).map(examples_of)
BATCHES = st.fixed_dictionaries(
    {
        "samples_per_step": st.integers(1, 12),
        "questions_per_image": st.none() | st.integers(1, 5),
        "samples_per_forward": st.integers(1, 5),
        "order": st.sampled_from(["random", "as_given"]),
        "loss": st.sampled_from(["token", "sample"]),
    }
)
RANKS = st.integers(1, 4)


def orders(examples: list[Example], num_ranks: int = 1, **batch: object) -> list[Order]:
    """That of each rank."""
    options = BatchSection(tokens_per_pack=TOKENS_PER_PACK, **batch)
    return [Order.of(examples, IMAGE, options, 7, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def steps_of(orders: list[Order], epoch: int = 0) -> list[list[Forward]]:
    """The forward passes of each step on all ranks."""
    return [
        [forward for step in steps for forward in step]
        for steps in zip(*(order.epoch(epoch) for order in orders), strict=True)
    ]


def numbers(step: list[Forward], *, fillers: bool = False) -> list[int]:
    packs = [forward.pack for forward in step if fillers or not forward.pack.is_filler]
    return [number for pack in packs for group in pack.groups for number in group.examples]


@quick
@given(EXAMPLES, BATCHES, RANKS, st.sampled_from(MODES))
def test_every_example_comes_once_an_epoch_on_one_of_the_ranks(examples, batch, num_ranks, mode):
    of_ranks = orders(examples, num_ranks, mode=mode, **batch)
    for epoch in range(NUM_EPOCHS):
        steps = steps_of(of_ranks, epoch)
        assert Counter(number for step in steps for number in numbers(step)) == Counter(range(len(examples)))
        assert {len(order) for order in of_ranks} == {len(steps)}


@quick
@given(EXAMPLES, BATCHES, RANKS)
def test_all_modes_have_the_same_steps_on_any_number_of_ranks(examples, batch, num_ranks):
    expected = [sorted(numbers(step)) for step in steps_of(orders(examples, mode="separate", **batch))]
    for mode in MODES:
        steps = steps_of(orders(examples, num_ranks, mode=mode, **batch))
        assert [sorted(numbers(step)) for step in steps] == expected


@quick
@given(EXAMPLES, BATCHES, RANKS, st.sampled_from(MODES))
def test_the_targets_of_a_step_weigh_1_over_all_ranks(examples, batch, num_ranks, mode):
    for step in steps_of(orders(examples, num_ranks, mode=mode, **batch)):
        weighed = [
            (number, weight)
            for forward in step
            for number, weight in zip(numbers([forward], fillers=True), forward.weights, strict=True)
        ]
        total = sum(weight * examples[number].supervised.sum() for number, weight in weighed)
        assert total == pytest.approx(1)


@quick
@given(EXAMPLES, BATCHES, RANKS, st.sampled_from(MODES))
def test_every_rank_has_as_many_forward_passes_and_what_fills_up_weighs_nothing(examples, batch, num_ranks, mode):
    of_ranks = orders(examples, num_ranks, mode=mode, **batch)
    for steps in zip(*(order.epoch(0) for order in of_ranks), strict=True):
        [num_forwards] = {len(step) for step in steps}
        assert num_forwards >= 1
        for forward in (forward for step in steps for forward in step):
            assert len(forward.weights) == forward.pack.num_samples >= 1
            assert all((weight == 0) == forward.pack.is_filler for weight in forward.weights)


@quick
@given(EXAMPLES, BATCHES, RANKS, st.sampled_from(MODES))
def test_lengths_are_those_of_all_packs_of_all_ranks(examples, batch, num_ranks, mode):
    of_ranks = orders(examples, num_ranks, mode=mode, **batch)
    found = [forward.pack.num_tokens for step in steps_of(of_ranks, 1) for forward in step]
    assert all(sorted(order.lengths(1)) == sorted(found) for order in of_ranks)


@quick
@given(EXAMPLES, BATCHES, st.integers(0, 20), st.integers(0, 20))
def test_a_training_goes_on_at_any_step_as_if_it_had_not_stopped(examples, batch, start, num_steps):
    [order] = orders(examples, **batch)
    whole = [step for epoch in range(40) for step in order.epoch(epoch)]
    assert list(order.steps(start, start + num_steps)) == whole[start : start + num_steps]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_is_coming_is_what_all_ranks_run_from_that_step_on_or_enough_of_it(num_ranks):
    examples = examples_of([(key, number % 5 + 1) for number, key in enumerate("aabacb" * 4)])
    of_ranks = orders(examples, num_ranks, samples_per_step=5)
    for order in of_ranks:
        found = order.coming(1, 3 * len(order))
        steps = zip(*(other.steps(1, 3 * len(order)) for other in of_ranks), strict=True)
        assert found == [forward for step in steps for forward in chain(*step)]
    assert len(of_ranks[0].coming(0, 10**6)) == ENOUGH_PACKS * num_ranks


@quick
@given(EXAMPLES, BATCHES, RANKS)
def test_packs_are_no_longer_than_allowed_and_rows_no_more(examples, batch, num_ranks):
    for mode in MODES:
        for step in steps_of(orders(examples, num_ranks, mode=mode, **batch)):
            for pack in (forward.pack for forward in step):
                if mode == "separate":
                    assert pack.num_samples <= batch["samples_per_forward"]
                else:
                    assert pack.num_tokens <= TOKENS_PER_PACK


@pytest.mark.parametrize(
    ("loss", "expected"), [("token", [1 / 6, 1 / 6, 1 / 6]), ("sample", [1 / 3, 1 / 6, 1 / 9])], ids=["token", "sample"]
)
def test_a_target_counts_as_one_of_the_steps_targets_or_of_its_samples(loss, expected):
    examples = examples_of([("a", 1), ("a", 2), ("", 3)])
    for mode in MODES:
        [step] = steps_of(orders(examples, mode=mode, samples_per_step=3, samples_per_forward=1, loss=loss))
        found = {
            number: weight
            for forward in step
            for number, weight in zip(numbers([forward]), forward.weights, strict=True)
        }
        assert [found[number] for number in range(3)] == pytest.approx(expected)


def test_questions_share_their_image_in_one_mode_and_have_their_own_in_the_others():
    examples = examples_of([("a", 2)] * 4)
    tokens = {}
    for mode in MODES:
        [order] = orders(examples, mode=mode, samples_per_step=4, samples_per_forward=4)
        tokens[mode] = sum(order.lengths(0))
    assert tokens == {"shared": 22 + 4 * 3, "packed": 4 * 25, "separate": 4 * 25}


def test_an_epoch_is_made_anew_from_its_number_and_the_seed():
    [order] = orders(examples_of([("a", 1)] * 10), samples_per_step=3, questions_per_image=1)
    epochs = [[numbers(step) for step in order.epoch(epoch)] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1]
