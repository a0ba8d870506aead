"""In which order a run sees its examples: the forward passes of each optimizer step.

Design: which examples make a step is decided first and does not depend on how they go through the model, so `shared`,
`packed` and `separate` train on the same steps. All of it follows from the seed and the number of the epoch; a run that
is resumed makes the order anew and goes to its place in it without reading anything. What a target counts is decided
here too, since only here the whole step is known, with all its forward passes on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

from lookonce.run.config import BatchSection
from lookonce.train.data.groups import Group, group_examples
from lookonce.train.data.packing import Pack, pack_step, row_batches
from lookonce.train.data.steps import epoch_steps, num_steps
from lookonce.train.data.tokenize import Example

ENOUGH_PACKS = 1000
"""To tell how long they get."""


@dataclass(frozen=True)
class Forward:
    """What goes through the model together."""

    pack: Pack
    weights: tuple[float, ...]
    """Of each example, in the order of the pack's groups: what each of its supervised tokens counts in the loss."""


@dataclass(frozen=True)
class Order:
    """The steps of a run, for one of `num_ranks` processes."""

    examples: Sequence[Example]
    groups: Sequence[Group]
    batch: BatchSection
    seed: int
    shuffle: bool = True
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(cls, examples: Sequence[Example], image_token_id: int, batch: BatchSection, seed: int, **kind: int) -> Order:
        return cls(
            examples, group_examples(examples, image_token_id), batch, seed, shuffle=batch.order == "random", **kind
        )

    def __len__(self) -> int:
        """Optimizer steps an epoch."""
        return num_steps(len(self.examples), self.batch.samples_per_step)

    def epoch(self, number: int) -> Iterator[list[Forward]]:
        """The forward passes of each step of an epoch, for this rank; every rank has as many."""
        return (self._weighed(step, ranks[self.rank]) for step, ranks in self._dealt(number))

    def steps(self, start: int, end: int) -> Iterator[list[Forward]]:
        """The forward passes of each step of a training, from one step to another, through all its epochs."""
        first, within = divmod(start, len(self))
        return islice(chain.from_iterable(map(self.epoch, count(first))), within, within + end - start)

    def lengths(self, number: int) -> list[int]:
        """Of all packs of an epoch on all ranks, in tokens."""
        return [pack.num_tokens for _, ranks in self._dealt(number) for packs in ranks for pack in packs]

    def coming(self, start: int, end: int) -> list[Forward]:
        """What all ranks run from one step of a training to another, or as much of it as tells what packs are like."""
        first, within = divmod(start, len(self))
        dealt = islice(chain.from_iterable(map(self._dealt, count(first))), within, within + end - start)
        forwards = (forward for step, ranks in dealt for packs in ranks for forward in self._weighed(step, packs))
        return list(islice(forwards, max(len(self), ENOUGH_PACKS) * self.num_ranks))

    def num_targets(self, forward: Forward) -> int:
        """Supervised tokens of a forward pass."""
        return sum(self._num_targets(number) for group in forward.pack.groups for number in group.examples)

    def _dealt(self, number: int) -> Iterator[tuple[list[Group], list[list[Pack]]]]:
        options = self.batch
        steps = epoch_steps(
            self.groups,
            options.samples_per_step,
            options.questions_per_image,
            self.seed,
            number,
            shuffle=self.shuffle,
        )
        return ((step, self._cut(step)) for step in steps)

    def _cut(self, step: list[Group]) -> list[list[Pack]]:
        if self.batch.mode == "shared":
            return pack_step(step, self.batch.tokens_per_pack, self.num_ranks)
        alone = [group.part([place]) for group in step for place in range(len(group.examples))]
        if self.batch.mode == "packed":
            return pack_step(alone, self.batch.tokens_per_pack, self.num_ranks)
        return row_batches(alone, self.batch.samples_per_forward, self.num_ranks)

    def _weighed(self, step: Sequence[Group], packs: Sequence[Pack]) -> list[Forward]:
        numbers = [number for group in step for number in group.examples]
        num_targets = sum(self._num_targets(number) for number in numbers)

        def weight(number: int) -> float:
            if self.batch.loss == "token":
                return 1 / max(num_targets, 1)
            return 1 / (len(numbers) * max(self._num_targets(number), 1))

        return [
            Forward(
                pack,
                tuple(0.0 if pack.is_filler else weight(number) for group in pack.groups for number in group.examples),
            )
            for pack in packs
        ]

    def _num_targets(self, number: int) -> int:
        return int(self.examples[number].supervised.sum())
