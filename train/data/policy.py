"""A step of reinforcement learning as packs: answers that were drawn to questions, and what each of them weighs.

Q questions, G answers to each, K targets of a pack.

An answer is an example as any other: the prompt of its question and its tokens as they were drawn, which are the
targets. So a group is a tree of images, questions and answers, and `nested` finds that the answers to a question share
its prompt; docs/grpo.md#what-it-costs counts the tokens. A step of 1,152 answers is made in 0.02 s.

Equal answers to a question with equal rewards are one example, whose weight is their number. They have the same
probabilities, so loss and gradients are those of separate ones. What weighs nothing is not computed: masked answers,
and questions without differences unless they are compared with a reference.

A target's weight is one over the number of tokens that count (`token`), or one over its answer's length and the number
of answers (`sequence`), as in TRL (its `dapo` and `grpo`). With `filter`, questions without differences do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.datasets.augment import EpochVariants
from lookonce.run.grpo import GrpoSection
from lookonce.run.sections import BatchSection
from lookonce.train.data.batches import Batch
from lookonce.train.data.dataset import DataCollatorForPacks, PackedExamples, PackIndices
from lookonce.train.data.packing import group_examples, nested, pack_step
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.data.tokenize import Example

EPSILON = 1e-4
"""Is added to a standard deviation, as in TRL."""
SAME = 1e-8
"""The largest standard deviation of rewards that do not differ."""
NOT_KNOWN = np.nan
"""Stands for a log-probability that is the pass's own."""
LogProbs = NDArray[np.float32]
MEASURES = ("weight", "kl", "clipped", "first", "distance")
"""The weight of targets; their KL divergence to the reference; the weight of those whose ratio is clipped; the weight
in the first pass, and how far their log-probabilities are there from those in decoding."""


class Drawn(NamedTuple):
    """One of the answers that a model drew to a question."""

    token_ids: Sequence[int]
    """With the end token, if there is one."""
    reward: float
    is_cut: bool = False
    """Whether it has no end token."""
    log_probs: Sequence[float] = ()
    """The log-probability of each token at the temperature, as it was drawn."""
    text: str = ""


class QuestionStream:
    """The questions of a training one after another, epoch after epoch, in the order in which SFT would have them."""

    def __init__(self, prompts: Sequence[Example], plan: Sampler, variants: EpochVariants | None = None) -> None:
        """`plan` orders the prompts; with `variants` each epoch shows others of their images."""
        self._prompts, self._variants, self._order = prompts, variants, cache(plan.order)

    def at(self, position: int) -> tuple[int, Example]:
        """The number and the prompt of the question at a position."""
        epoch, place = divmod(position, len(self._prompts))
        prompt = self._prompts[number := self._order(epoch)[place]]
        if self._variants is None:
            return number, prompt
        return number, replace(prompt, image_keys=self._variants.keys(prompt.image_keys, epoch))


def advantages(reward_QG: NDArray[np.float64], scale: str = "std") -> NDArray[np.float64]:
    """How much better each answer is than the mean of those to its question, `[Q, G]`; with `std` in units of their
    standard deviation."""
    centred_QG = reward_QG - reward_QG.mean(axis=1, keepdims=True)
    scale_Q1 = reward_QG.std(axis=1, ddof=1, keepdims=True) + EPSILON if scale == "std" else 1.0
    advantage_QG: NDArray[np.float64] = centred_QG / scale_Q1
    return advantage_QG


def differ(reward_QG: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the answers to each question have different rewards, so that something can be learned: `[Q]`."""
    are_mixed: NDArray[np.bool_] = reward_QG.std(axis=1, ddof=1) > SAME
    return are_mixed


def teaches(group: Sequence[Drawn], options: GrpoSection, image_token_id: int) -> bool:
    """Whether something can be learned from the answers to a question: one that is not left out is better or worse than
    the others."""
    rewards = np.array([[answer.reward for answer in group]])
    counts = [not _is_masked(answer, options, image_token_id) for answer in group]
    return bool(differ(rewards)[0] and (np.abs(rewards[0] - rewards.mean())[counts] > SAME).any())


def answered(prompt: Example, token_ids: Sequence[int]) -> Example:
    """The example of an answer to the question of a prompt."""
    tokens = np.concatenate([prompt.token_ids, np.asarray(token_ids, dtype=prompt.token_ids.dtype)])
    supervised = np.arange(len(tokens)) >= len(prompt.token_ids)
    return Example(tokens, supervised, prompt.image_keys, prompt.num_image_tokens, prompt.origin, prompt.stage)


@dataclass(eq=False)
class TrainedAnswer:
    """Equal answers to a question, as they are trained on."""

    example: Example
    advantage: float
    weight: float
    """The weight of each target in the loss of the step."""
    old: LogProbs
    """The log-probabilities of the targets when they were drawn; `NOT_KNOWN` before the first pass."""
    reference: LogProbs
    """The same of the model that it is compared with."""
    drawn: LogProbs
    """The same as decoding gave them; empty if they are not known."""


@dataclass(frozen=True)
class RewardStep:
    """The answers of a step that are trained on."""

    answers: Sequence[TrainedAnswer]
    image_token_id: int
    batch: BatchSection = field(repr=False)
    """The section `batch` of the run file."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Example],
        drawn: Sequence[Sequence[Drawn]],
        options: GrpoSection,
        batch: BatchSection,
        image_token_id: int,
    ) -> RewardStep:
        """The step of some questions, by their prompts, with equally many answers drawn to each."""
        if not drawn:
            return cls([], image_token_id, batch)
        reward_QG = np.array([[answer.reward for answer in group] for group in drawn], dtype=np.float64)
        advantage_QG, mixed_Q = advantages(reward_QG, options.scale), differ(reward_QG)
        counts_Q = mixed_Q if options.filter else np.ones_like(mixed_Q)
        masked = [[_is_masked(answer, options, image_token_id) for answer in group] for group in drawn]
        by_sequence, total = options.loss == "sequence", 0
        for group, are_masked, counts in zip(drawn, masked, counts_Q.tolist(), strict=True):
            lengths = [
                1 if by_sequence else len(answer.token_ids) * (not left_out)
                for answer, left_out in zip(group, are_masked, strict=True)
            ]
            total += sum(lengths) if counts else 0
        answers: list[TrainedAnswer] = []
        for q in np.flatnonzero(counts_Q & (mixed_Q | bool(options.kl))).tolist():
            distinct: dict[tuple[tuple[int, ...], float], TrainedAnswer] = {}
            for answer, left_out, advantage in zip(drawn[q], masked[q], advantage_QG[q].tolist(), strict=True):
                if left_out:
                    continue
                length, key = len(answer.token_ids), (tuple(answer.token_ids), advantage)
                if key not in distinct:
                    unknown, known = np.full(length, NOT_KNOWN, np.float32), np.array(answer.log_probs, np.float32)
                    example = answered(prompts[q], answer.token_ids)
                    distinct[key] = TrainedAnswer(
                        example, advantage, 0.0, old=unknown, reference=unknown.copy(), drawn=known
                    )
                distinct[key].weight += 1 / (total * length if by_sequence else total)
            answers += distinct.values()
        return cls(answers, image_token_id, batch)

    def micro_batches(self, num_ranks: int = 1) -> list[list[MicroBatch]]:
        """The packs of each rank, equally many; raises ValueError if an answer with its prompt exceeds a pack."""
        examples = [answer.example for answer in self.answers]
        if not examples:
            return [[] for _ in range(num_ranks)]
        groups = [nested(group, examples) for group in group_examples(examples, self.image_token_id)]
        return [
            [
                MicroBatch(pack, tuple(0.0 if pack.is_filler else self.answers[n].weight for n in pack.examples))
                for pack in packs
            ]
            for packs in pack_step(groups, self.batch.tokens_per_pack, num_ranks)
        ]

    def packs(self, rank: int = 0, num_ranks: int = 1) -> list[PackIndices]:
        """The same of one rank, as `collate` takes them."""
        own = self.micro_batches(num_ranks)[rank]
        return [
            PackIndices(micro_batch, number == len(own), num_ranks, self.batch)
            for number, micro_batch in enumerate(own, start=1)
        ]

    def collate(self, indices: PackIndices, collator: DataCollatorForPacks) -> dict[str, Any]:
        """A pack as `pack_loss` takes it, with the tensors that the loss of rewards needs."""
        numbers = [*indices]
        packed = collator(PackedExamples({number: self.answers[number].example for number in numbers}, indices))
        tensors = self.tensors(numbers)
        return packed | {name: tensor.to(packed["targets"].device) for name, tensor in tensors.items()}

    def tensors(self, numbers: Iterable[int]) -> Batch:
        """What the targets of some answers have beside their weights, `[1, K]` each: see `REWARD_KEYS` of the loss."""
        chosen = [self.answers[number] for number in numbers]
        columns = {
            "advantages": [np.full(len(answer.old), answer.advantage, dtype=np.float32) for answer in chosen],
            "old_log_probs": [answer.old for answer in chosen],
            "reference_log_probs": [answer.reference for answer in chosen],
            "log_probs": [np.zeros_like(answer.old) for answer in chosen],
        }
        return {name: torch.from_numpy(np.concatenate(parts))[None] for name, parts in columns.items()}

    def keep(self, numbers: Iterable[int], log_prob_K: LogProbs, *, of_reference: bool = False) -> None:
        """Keep the log-probabilities that a pass gave the targets of some answers, for the passes after it, unless
        those of an earlier pass are kept."""
        start = 0
        for number in numbers:
            answer = self.answers[number]
            kept = answer.reference if of_reference else answer.old
            np.copyto(kept, log_prob_K[start : start + len(kept)], where=np.isnan(kept))
            start += len(kept)
        assert start == len(log_prob_K), (start, len(log_prob_K))

    def measure(self, numbers: Iterable[int], log_prob_K: LogProbs, clip: Sequence[float]) -> NDArray[np.float64]:
        """What a pass says of some answers as sums over their targets, by their weights: `MEASURES`."""
        chosen = [self.answers[number] for number in numbers]
        lengths = [len(answer.old) for answer in chosen]
        old, reference = (np.concatenate([getattr(answer, name) for answer in chosen]) for name in ("old", "reference"))
        drawn = np.concatenate([answer.drawn if len(answer.drawn) else answer.old * np.nan for answer in chosen])
        is_better = np.repeat([answer.advantage > 0 for answer in chosen], lengths)
        weights = np.repeat([answer.weight for answer in chosen], lengths)
        own = log_prob_K[: len(old)].astype(np.float64)
        ratio = np.exp(own - np.where(np.isnan(old), own, old))
        above = np.where(np.isnan(reference), own, reference) - own
        is_clipped = np.where(is_better, ratio > 1 + clip[1], ratio < 1 - clip[0])
        first = np.isnan(old) & ~np.isnan(drawn)
        distance = np.where(first, np.abs(own - drawn), 0.0)
        sums: NDArray[np.float64] = (
            np.stack([np.ones(len(own)), np.exp(above) - above - 1, is_clipped, first, distance]) @ weights
        )
        return sums


def _is_masked(answer: Drawn, options: GrpoSection, image_token_id: int) -> bool:
    """Whether nothing is learned from an answer; an image token in it would stand for an image that is not there."""
    return (answer.is_cut and options.cut == "masked") or image_token_id in answer.token_ids
