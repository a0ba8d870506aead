"""The sampler: which examples are in which optimizer step and micro-batch, and what each target weighs in the loss.

Design: the examples of a step are chosen first, independently of how they go through the model, so the modes `shared`,
`packed` and `separate` train on the same steps. Everything follows from the seed and the epoch's number: a resumed run
computes the order again and skips to its step without reading any data.

The sampler also sets the target weights, since only here the whole step is known, with all its micro-batches on all
ranks. The loss of a step is the sum over its targets of cross-entropy times target weight. The weights of a step sum to
1, so it can be cut into micro-batches, and distributed over ranks, in any way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice

from lookonce.run.sections.batch import BatchSection
from lookonce.train.data.groups import Group, group_examples, nested
from lookonce.train.data.packing import Pack, pack_step, row_batches
from lookonce.train.data.steps import epoch_steps, num_steps
from lookonce.train.data.tokenize import Example

ENOUGH_PACKS = 1000
"""Number of packs whose lengths represent those of a long training."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: a pack, or some rows."""

    pack: Pack
    target_weights: tuple[float, ...]
    """For each example, in the order of the pack's groups: the weight of each of its targets in the step's loss."""


@dataclass(frozen=True)
class Sampler:
    """The steps of a training, for one of `num_ranks` ranks."""

    examples: Sequence[Example]
    groups: Sequence[Group]
    batch: BatchSection
    seed: int
    shuffle: bool = True
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(
        cls, examples: Sequence[Example], image_token_id: int, batch: BatchSection, seed: int, **ranks: int
    ) -> Sampler:
        """The sampler of some examples; `ranks` are `rank` and `num_ranks`."""
        groups = [nested(group, examples) for group in group_examples(examples, image_token_id)]
        return cls(examples, groups, batch, seed, shuffle=batch.order != "as_given", **ranks)

    def __len__(self) -> int:
        """Optimizer steps per epoch."""
        return num_steps(len(self.examples), self.batch.samples_per_step)

    def epoch(self, number: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step of an epoch; all ranks have equally many."""
        return (self._micro_batches(step, ranks[self.rank]) for step, ranks in self._packed_steps(number))

    def steps(self, start: int, end: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of the steps `start` to `end` of a training, across its epochs."""
        first, skipped = divmod(start, len(self))
        return islice(chain.from_iterable(map(self.epoch, count(first))), skipped, skipped + end - start)

    def pack_lengths(self, number: int) -> list[int]:
        """The number of tokens of each pack of an epoch, on all ranks."""
        return [pack.num_tokens for _, ranks in self._packed_steps(number) for packs in ranks for pack in packs]

    def upcoming(self, start: int, end: int) -> list[MicroBatch]:
        """All ranks' micro-batches of the steps `start` to `end`, or enough of them to know the lengths of packs."""
        first, skipped = divmod(start, len(self))
        steps = islice(chain.from_iterable(map(self._packed_steps, count(first))), skipped, skipped + end - start)
        micro_batches = (self._micro_batches(step, packs) for step, ranks in steps for packs in ranks)
        return list(islice(chain.from_iterable(micro_batches), max(len(self), ENOUGH_PACKS) * self.num_ranks))

    def num_targets(self, micro_batch: MicroBatch) -> int:
        """Number of targets of a micro-batch."""
        return sum(self.examples[index].num_targets for group in micro_batch.pack.groups for index in group.examples)

    def _packed_steps(self, number: int) -> Iterator[tuple[list[Group], list[list[Pack]]]]:
        """Each step of an epoch: its groups, and the packs of each rank."""
        steps = epoch_steps(
            self.groups,
            self.batch.samples_per_step,
            self.batch.questions_per_image,
            self.seed,
            number,
            shuffle=self.shuffle,
        )
        return ((step, self._pack(step)) for step in steps)

    def _pack(self, step: list[Group]) -> list[list[Pack]]:
        """The packs, or batches of rows, of each rank."""
        if self.batch.mode != "shared":
            step = [group.subset([member]) for group in step for member in range(len(group.examples))]
        if self.batch.has_packs:
            return pack_step(step, self.batch.tokens_per_pack, self.num_ranks)
        rows = [one.whole(self.examples) for one in step]
        return row_batches(rows, self.batch.samples_per_forward, self.num_ranks)

    def _micro_batches(self, step: Sequence[Group], packs: Sequence[Pack]) -> list[MicroBatch]:
        """The packs with their target weights, which depend on the whole step."""
        samples = [index for group in step for index in group.examples]
        num_targets = sum(self.examples[index].num_targets for index in samples)

        def target_weight(index: int) -> float:
            if self.batch.loss == "token":
                return 1 / max(num_targets, 1)
            return 1 / (len(samples) * max(self.examples[index].num_targets, 1))

        def of_pack(pack: Pack) -> tuple[float, ...]:
            indices = (index for group in pack.groups for index in group.examples)
            return tuple(0.0 if pack.is_filler else target_weight(index) for index in indices)

        return [MicroBatch(pack, of_pack(pack)) for pack in packs]
