"""The sampler: the same steps in every mode and on any number of ranks, with target weights that sum to 1."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain, count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.run.sections import BatchSection
from lookonce.train.data.sampler import ENOUGH_PACKS, MicroBatch, Sampler
from lookonce.train.data.tokenize import Example

START, IMAGE, END = 97, 98, 99
TOKENS_OF = {"a": 20, "b": 35, "c": 50}
TOKENS_PER_PACK = 100
MODES = ("shared", "packed", "separate")
NUM_EPOCHS = 3


def example(key: str, number: int, len_answer: int, stage: int = 0, weight: float = 1.0) -> Example:
    """An example with a unique question, about an image or about none."""
    images = [START, IMAGE, END] if key else []
    tokens = [*images, number, *range(len_answer)]
    supervised = np.arange(len(tokens)) >= len(tokens) - len_answer
    num_tokens = tuple(TOKENS_OF[k] for k in key)
    return Example(np.array(tokens, np.int32), supervised, tuple(key), num_tokens, "", stage, weight)


def examples_of(asked: list[tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, float]]) -> list[Example]:
    numbers = count(100)
    return [example(key, next(numbers), *answer_stage_and_weight) for key, *answer_stage_and_weight in asked]


WEIGHTS = st.sampled_from([1.0, 1.0, 0.01, 70.0])
EXAMPLES = st.lists(
    st.tuples(st.sampled_from(["a", "a", "b", "c", ""]), st.integers(1, 5), st.integers(0, 2), WEIGHTS),
    min_size=1,
    max_size=30,
).map(examples_of)
BATCHES = st.fixed_dictionaries(
    {
        "samples_per_step": st.integers(1, 12),
        "questions_per_image": st.none() | st.integers(1, 5),
        "samples_per_forward": st.integers(1, 5),
        "order": st.sampled_from(["random", "as_given", {"by": "stage", "stages": [1, 2, 3]}]),
        "loss": st.sampled_from(["token", "sample", "micro_batch"]),
    }
)
RANKS = st.integers(1, 4)


def samplers(examples: list[Example], num_ranks: int = 1, **batch: object) -> list[Sampler]:
    """The sampler of each rank."""
    options = BatchSection(tokens_per_pack=TOKENS_PER_PACK, **batch)
    return [Sampler.of(examples, IMAGE, options, 7, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def steps_of(samplers: list[Sampler], epoch: int = 0) -> list[list[MicroBatch]]:
    """The micro-batches of each step on all ranks."""
    return [
        [micro_batch for step in steps for micro_batch in step]
        for steps in zip(*(sampler.epoch(epoch) for sampler in samplers), strict=True)
    ]


def numbers(step: list[MicroBatch], *, fillers: bool = False) -> list[int]:
    packs = [micro_batch.pack for micro_batch in step if fillers or not micro_batch.pack.is_filler]
    return [number for pack in packs for group in pack.groups for number in group.examples]


@pytest.mark.guarantee("Every record is trained on once an epoch.")
@given(EXAMPLES, BATCHES, RANKS, st.sampled_from(MODES))
def test_every_example_comes_once_an_epoch_on_one_of_the_ranks(examples, batch, num_ranks, mode):
    of_ranks = samplers(examples, num_ranks, mode=mode, **batch)
    for epoch in range(NUM_EPOCHS):
        steps = steps_of(of_ranks, epoch)
        assert Counter(number for step in steps for number in numbers(step)) == Counter(range(len(examples)))
        assert {len(sampler) for sampler in of_ranks} == {len(steps)}


@pytest.mark.guarantee("Every step has exactly the configured number of samples, except for the last one of an epoch.")
@given(EXAMPLES, BATCHES, RANKS)
def test_all_modes_have_the_same_steps_on_any_number_of_ranks(examples, batch, num_ranks):
    expected = [sorted(numbers(step)) for step in steps_of(samplers(examples, mode="separate", **batch))]
    for mode in MODES:
        steps = steps_of(samplers(examples, num_ranks, mode=mode, **batch))
        assert [sorted(numbers(step)) for step in steps] == expected


@given(EXAMPLES, BATCHES, RANKS, st.sampled_from(MODES))
def test_ranks_have_equally_many_micro_batches_and_the_target_weights_of_a_step_sum_to_1(
    examples, batch, num_ranks, mode
):
    of_ranks, lengths = samplers(examples, num_ranks, mode=mode, **batch), []
    for steps in zip(*(sampler.epoch(1) for sampler in of_ranks), strict=True):
        [num_micro_batches] = {len(step) for step in steps}
        assert num_micro_batches >= 1
        total = 0.0
        for micro_batch in chain(*steps):
            assert len(micro_batch.target_weights) == micro_batch.pack.num_samples >= 1
            assert all((weight == 0) == micro_batch.pack.is_filler for weight in micro_batch.target_weights)
            lengths.append(micro_batch.pack.num_tokens)
            weights = zip(numbers([micro_batch], fillers=True), micro_batch.target_weights, strict=True)
            total += sum(weight * examples[number].num_targets for number, weight in weights)
        assert total == pytest.approx(1)
    assert all(sorted(sampler.pack_lengths(1)) == sorted(lengths) for sampler in of_ranks)


@given(EXAMPLES, BATCHES, st.integers(0, 20), st.integers(0, 20))
def test_a_training_resumes_at_any_step_with_the_same_order(examples, batch, start, num_steps):
    [sampler] = samplers(examples, **batch)
    whole = [step for epoch in range(40) for step in sampler.epoch(epoch)]
    assert list(sampler.steps(start, start + num_steps)) == whole[start : start + num_steps]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_upcoming_micro_batches_are_those_of_all_ranks_from_a_step_on_or_enough_of_them(num_ranks):
    examples = examples_of([(key, number % 5 + 1) for number, key in enumerate("aabacb" * 4)])
    of_ranks = samplers(examples, num_ranks, samples_per_step=5)
    for sampler in of_ranks:
        found = sampler.upcoming(1, 3 * len(sampler))
        steps = zip(*(other.steps(1, 3 * len(sampler)) for other in of_ranks), strict=True)
        assert found == [micro_batch for step in steps for micro_batch in chain(*step)]
    assert len(of_ranks[0].upcoming(0, 10**6)) == ENOUGH_PACKS * num_ranks


@pytest.mark.parametrize(
    ("loss", "weights", "expected"),
    [
        ("token", (1, 1, 1), [1 / 7, 1 / 7, 1 / 7]),
        ("sample", (1, 1, 1), [1 / 3, 1 / 9, 1 / 9]),
        ("micro_batch", (1, 1, 1), [1 / 8, 1 / 8, 1 / 6]),  # means of the first two samples, and of the third
        ("token", (4, 1, 0.5), [4 / 8.5, 1 / 8.5, 0.5 / 8.5]),  # 4 x 1 + 1 x 3 + 0.5 x 3 weighted targets
        ("sample", (4, 1, 0.5), [4 / 5.5, 1 / 16.5, 0.5 / 16.5]),
    ],
)
def test_target_weights_average_over_targets_samples_or_micro_batches(loss, weights, expected):
    plain = examples_of([("a", 1), ("a", 3), ("", 3)])
    examples = [replace(example, weight=weight) for example, weight in zip(plain, weights, strict=True)]
    batch = {"samples_per_step": 3, "samples_per_forward": 2, "order": "as_given", "loss": loss}
    for mode in MODES:
        [step] = steps_of(samplers(examples, mode=mode, **batch))
        found = {
            number: weight
            for micro_batch in step
            for number, weight in zip(numbers([micro_batch]), micro_batch.target_weights, strict=True)
        }
        assert [found[number] for number in range(3)] == pytest.approx(expected)


@pytest.mark.guarantee(
    "With `batch.order` by a metadata field, an epoch goes through the values of the field in order, in every "
    "batch mode."
)
def test_stages_are_trained_on_one_after_another_in_every_mode():
    examples = examples_of([(key, 1, stage) for stage in (1, 0, 2) for key in "abcab"])
    for mode in MODES:
        [sampler] = samplers(examples, mode=mode, samples_per_step=4, order={"by": "stage", "stages": [1, 2, 3]})
        for epoch in range(NUM_EPOCHS):
            stages = [sorted(examples[number].stage for number in numbers(step)) for step in sampler.epoch(epoch)]
            assert stages == [[0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 2, 2], [2, 2, 2]]


@pytest.mark.guarantee(
    "With `batch.order: as_given`, each step has the next records of the files, in every batch mode."
)
def test_as_given_each_step_has_the_next_records_in_every_mode():
    examples = examples_of([(key, 1) for key in "abcabca"])
    for mode in MODES:
        [sampler] = samplers(examples, mode=mode, samples_per_step=3, order="as_given")
        assert [sorted(numbers(step)) for step in sampler.epoch(1)] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.guarantee(
    "With `batch.loss: micro_batch`, a step has the loss and gradients of the stock Trainer with gradient accumulation."
)
def test_as_given_micro_batches_have_the_next_records_although_questions_share_an_image():
    examples = examples_of([("a", 1), ("b", 3), ("a", 5), ("b", 2)])
    expected = [1 / 8, 1 / 8, 1 / 14, 1 / 14]  # two micro-batches: targets 1 + 3 and 5 + 2
    for mode in MODES:
        [sampler] = samplers(
            examples, mode=mode, samples_per_step=4, samples_per_forward=2, order="as_given", loss="micro_batch"
        )
        [step] = sampler.epoch(0)
        weights = [weight for micro_batch in step for weight in micro_batch.target_weights]
        assert [weight for _, weight in sorted(zip(numbers(step), weights, strict=True))] == pytest.approx(expected)
