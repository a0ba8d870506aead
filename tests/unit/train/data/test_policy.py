"""What answers weigh: within their question, in their step, once if equal; and that prompts are shared by them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.datasets.augment import Augment, EpochVariants
from lookonce.run.grpo import GrpoSection
from lookonce.run.sections import BatchSection
from lookonce.train.data.packing import group_examples
from lookonce.train.data.policy import MEASURES, Drawn, QuestionStream, RewardStep, advantages, differ, teaches
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.tokenize import Example

IMAGE, END = 98, 99
NUM_IMAGE_TOKENS = 300


def prompt(image: str, *question: int) -> Example:
    tokens = np.array([97, IMAGE, 96, *question], np.int32)
    return Example(tokens, np.zeros(len(tokens), np.bool_), (image,), (NUM_IMAGE_TOKENS,), "")


def step_of(drawn: Sequence[Sequence[Drawn]], **options: Any) -> RewardStep:
    """Questions about two images in turn, whose first tokens are equal."""
    prompts = [prompt("ab"[number % 2], 5, 6, number // 2, 7) for number in range(len(drawn))]
    batch = BatchSection(tokens_per_pack=500)
    return RewardStep.of(prompts, drawn, GrpoSection(**{"samples": len(drawn[0])} | options), batch, IMAGE)


REWARDS = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=size, max_size=size), min_size=1)
)


@given(REWARDS, st.sampled_from(["std", "none"]))
def test_advantages_are_the_rewards_less_their_mean_in_units_of_their_deviation(rewards, scale):
    reward_QG = np.array(rewards)
    for group, found, is_mixed in zip(rewards, advantages(reward_QG, scale), differ(reward_QG), strict=True):
        unit = statistics.stdev(group) + 1e-4 if scale == "std" else 1
        expected = [(reward - statistics.fmean(group)) / unit for reward in group]
        assert found == pytest.approx(expected, abs=1e-9)
        assert is_mixed == (len({*group}) > 1)


def drawn_of(*groups: tuple[tuple[int, ...], ...]) -> list[list[Drawn]]:
    """Answers by their tokens. They are worth 1 if they begin with 1, and cut off if they have no end token."""
    return [[Drawn(ids, float(ids[0] == 1), END not in ids) for ids in group] for group in groups]


DRAWN = drawn_of(
    ((1, END), (2, 3, END), (1, END), (4, 4, 4)),
    ((1, END), (1, 2, END), (1, 3, END), (1, 4, 4)),  # without differences
    ((2, END), (1, 2, END), (2, END), (2, END)),
)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Per question, the weights of (1, END), (2, 3, END) and so on: number of equal ones over all tokens that count.
        ({}, [[2 / 16, 1 / 16], [3 / 16, 1 / 16]]),
        ({"cut": "punished"}, [[2 / 19, 1 / 19, 1 / 19], [3 / 19, 1 / 19]]),
        ({"filter": False}, [[2 / 24, 1 / 24], [3 / 24, 1 / 24]]),
        ({"filter": False, "kl": 0.1}, [[2 / 24, 1 / 24], [1 / 24, 1 / 24, 1 / 24], [3 / 24, 1 / 24]]),
        ({"loss": "sequence"}, [[2 / 8 / 2, 1 / 8 / 3], [3 / 8 / 2, 1 / 8 / 3]]),
        ({"loss": "sequence", "filter": False}, [[2 / 12 / 2, 1 / 12 / 3], [3 / 12 / 2, 1 / 12 / 3]]),
    ],
)
def test_equal_answers_are_trained_on_once_with_the_sum_of_their_weights(options, expected):
    step, weights = step_of(DRAWN, **options), defaultdict(list)
    for answer in step.answers:
        weights[tuple(answer.example.token_ids[:7]), answer.example.image_keys].append(answer.weight)
    assert [*weights.values()] == [pytest.approx(group) for group in expected]
    assert all(answer.example.num_targets == len(answer.old) == len(answer.reference) for answer in step.answers)


def test_an_answer_with_an_image_token_or_none_at_all_teaches_nothing():
    step = step_of(drawn_of(((1, IMAGE, END), (2, END))))
    assert [answer.example.token_ids[-2] for answer in step.answers] == [2]
    for nothing in (((1, END), (1, END)), ((1, 2), (3, 4))):
        step = step_of(drawn_of(nothing))
        assert step.answers == [] and step.packs() == [] and step.micro_batches(2) == [[], []]


def test_a_pack_is_a_tree_of_image_questions_and_answers():
    """All answers to a question share the tokens of its prompt, and all questions those of their image."""
    answers = [(1, 2, END), (1, 3, END), (4, END), (END,)]
    step = step_of([[Drawn(ids, float(number)) for number, ids in enumerate(answers)]] * 8)  # 4 about each image
    [packs] = step.micro_batches()
    assert {len(micro_batch.pack.groups) for micro_batch in packs} == {1}
    # The first two tokens of all questions are the image's; the last target of an answer is no input.
    own = sum(len(ids) - 1 for ids in answers) + 1  # but one of END alone, as no branch is empty
    of_image = NUM_IMAGE_TOKENS + 2 + 2 + 4 * (2 + own)
    assert [micro_batch.pack.num_tokens for micro_batch in packs] == [of_image] * 2
    groups = group_examples([answer.example for answer in step.answers], IMAGE)
    assert groups[0].num_tokens == of_image + 4 * 2 * (len(answers) - 1), "each with a prompt of its own"


def test_ranks_and_packs_have_all_answers_once_and_fillers_weigh_nothing():
    step = step_of(DRAWN)
    for num_ranks in (1, 2, 3, 8):
        ranks = step.micro_batches(num_ranks)
        assert len({len(packs) for packs in ranks}) == 1
        weights: dict[int, list[float]] = defaultdict(list)
        for micro_batch in (one for packs in ranks for one in packs):
            numbers = [number for group in micro_batch.pack.groups for number in group.examples]
            for number, weight in zip(numbers, micro_batch.target_weights, strict=True):
                weights[number].append(weight)
        assert {number: sum(found) for number, found in weights.items()} == {
            number: answer.weight for number, answer in enumerate(step.answers)
        }
    assert [indices.ends_step for indices in step.packs(1, 2)][-1]


def test_log_probabilities_are_kept_where_they_belong():
    step = step_of(DRAWN)
    numbers = [2, 0]
    tensors = step.tensors(numbers)
    assert tensors["old_log_probs"].isnan().all() and tensors["advantages"].shape == tensors["log_probs"].shape == (
        1,
        4,
    )
    assert tensors["advantages"][0].tolist() == pytest.approx(
        [step.answers[2].advantage] * 2 + [step.answers[0].advantage] * 2
    )
    step.keep(numbers, np.arange(4, dtype=np.float32))
    step.keep(numbers, -np.arange(4, dtype=np.float32), of_reference=True)
    assert step.tensors([0, 2])["old_log_probs"].tolist() == [[2, 3, 0, 1]]
    assert step.tensors([0, 2])["reference_log_probs"].tolist() == [[-2, -3, 0, -1]]
    assert step.tensors([1])["old_log_probs"].isnan().all()


def test_the_stream_has_each_epoch_in_the_order_of_its_steps_with_the_variants_that_it_shows():
    prompts = [prompt("abc"[number % 3], 5, number) for number in range(11)]
    plan = Sampler.of(prompts, IMAGE, BatchSection(samples_per_step=3), seed=5)
    variants = EpochVariants(Augment(variants=2, brightness=0.1), seed=7)
    plain, shown = QuestionStream(prompts, plan), QuestionStream(prompts, plan, variants)
    num = len(prompts)

    def take(stream: QuestionStream, first: int, last: int) -> list[tuple[int, Example]]:
        return [stream.at(position) for position in range(first, last)]

    for epoch in range(3):
        asked = take(plain, epoch * num, (epoch + 1) * num)
        groups = [[group for one in step for group in one.pack.groups] for step in plan.epoch(epoch)]
        expected = [{index for group in step for index in group.examples} for step in groups]
        assert [{number for number, _ in asked[start : start + 3]} for start in range(0, num, 3)] == expected
        assert all(example is prompts[number] for number, example in asked)
        for number, example in take(shown, epoch * num, (epoch + 1) * num):
            assert example.image_keys == variants.keys(prompts[number].image_keys, epoch)
    assert [number for number, _ in take(plain, 0, num)] != [number for number, _ in take(plain, num, 2 * num)]


@pytest.mark.parametrize(
    ("rewards", "cut", "expected"),
    [
        ((1, 0, 0), (0, 0, 0), True),
        ((1, 1, 1), (0, 0, 0), False),
        ((1, 0, 0), (1, 1, 1), False),
        ((0.5, 1, 0), (0, 1, 1), False),  # what is left is as good as the mean
        ((1, 0, 0), (1, 0, 0), True),
    ],
)
def test_a_question_teaches_if_an_answer_that_is_not_left_out_is_better_or_worse(rewards, cut, expected):
    group = [Drawn((n, END), reward, bool(is_cut)) for n, (reward, is_cut) in enumerate(zip(rewards, cut, strict=True))]
    assert teaches(group, GrpoSection(), IMAGE) == expected
    step = RewardStep.of([prompt("a", 5)], [group], GrpoSection(), BatchSection(), IMAGE)
    assert any(answer.advantage for answer in step.answers) == expected
    assert teaches(group, GrpoSection(cut="kept"), IMAGE) == (len({*rewards}) > 1)


def test_measures_are_means_over_targets_by_their_weights():
    drawn = [[Drawn((1, 2, END), 1.0, False, (-1.0, -2.0, -0.5)), Drawn((3, END), 0.0, False, (-0.1, -3.0))]]
    step = RewardStep.of([prompt("a", 5)], drawn, GrpoSection(), BatchSection(), IMAGE)
    own = np.log(np.array([0.5, 0.25, 0.5, 0.5, 0.5], dtype=np.float32))
    first = dict(zip(MEASURES, step.measure([0, 1], own, (0.2, 0.28)), strict=True))
    expected = np.abs(own - np.array([-1, -2, -0.5, -0.1, -3])).mean()
    assert first == pytest.approx({"weight": 1, "kl": 0, "clipped": 0, "first": 1, "distance": expected}, abs=1e-6)
    step.keep([0, 1], own)
    step.keep([0, 1], own - np.log(np.float32(2)), of_reference=True)
    ratios = np.array([1.5, 1.0, 0.5, 1.5, 0.7], dtype=np.float32)  # the first answer is better, the second worse
    later = dict(zip(MEASURES, step.measure([0, 1], own + np.log(ratios), (0.2, 0.28)), strict=True))
    above = -np.log(2 * ratios)
    kl = (np.exp(above) - above - 1).mean()
    assert later == pytest.approx({"weight": 1, "kl": kl, "clipped": 2 / 5, "first": 0, "distance": 0}, abs=1e-6)
