"""The sampler: which examples are in which optimizer step and micro-batch, and what each target weighs in the loss.

The examples of a step are chosen independently of how they go through the model, so the modes `shared`, `packed` and
`separate` train on the same steps. Everything follows from the seed and the epoch's number, so a resumed run skips to
its step without reading any data. The whole step, with all its micro-batches on all ranks, is known here alone, so
target weights are set here. The loss of a step is the sum over its targets of cross-entropy times target weight. The
weights sum to 1, so a step can be cut into micro-batches, and distributed over ranks, in any way.

A step has exactly `samples_per_step` examples, however many images they are about. The examples of a group stay
together in chunks of at most `questions_per_image`, and chunks are shuffled. With 1, this is the usual random order of
examples. Without a limit, each image is processed once per epoch; the cost is that a step is about fewer images.

A chunk that crosses the end of a step is split, and its prefix processed twice. So if the next chunk does not fit, the
largest of the next `NUM_AHEAD` chunks that fits goes first, and the one that was passed over starts the next step. For
6,500 images, 38 % with 1 question, 29 % with 17 and the rest with 8 to 16, an epoch processes 8,800 prefixes instead of
9,800 at 16 samples per step (17 never fit), and 6,500 instead of 6,900 at 128. The cost is an order that is not quite
random: small chunks move forward by some tens of positions.

With stages, the chunks of each are shuffled among themselves, and none goes before the rest of an earlier stage. A step
may hold the end of one stage and the beginning of the next. Without shuffling, each step has the next examples of the
files; those about one image share the prefix if they are in one step.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice, takewhile

from lookonce.run.sections import BatchSection
from lookonce.train.data.packing import Group, Pack, group_examples, nested, pack_step, row_batches
from lookonce.train.data.tokenize import Example

NUM_AHEAD = 32
"""Number of chunks that are searched for one that fits, the next one included."""
ENOUGH_PACKS = 1000
"""Number of packs whose lengths represent those of a long training."""


@dataclass(frozen=True)
class Chunk:
    """Some examples of a group that stay together."""

    stage: int
    group: int
    members: range
    """Positions in the random order of the group. Splitting a range costs the same at any length."""


def num_steps(num_samples: int, samples_per_step: int) -> int:
    return math.ceil(num_samples / samples_per_step)


def epoch_steps(
    groups: Sequence[Group],
    samples_per_step: int,
    questions_per_image: int | None,
    seed: int,
    epoch: int,
    *,
    shuffle: bool = True,
) -> list[list[Group]]:
    """The steps of an epoch as groups: every example once, `samples_per_step` of them in each step except the last.

    `questions_per_image` is how many examples of a group stay together; None means all. If more of them happen to be in
    one step, they share the prefix there. Without `shuffle` the order is that of the examples.
    """
    if not shuffle:
        return _in_order(groups, samples_per_step)
    # A string seed is hashed with sha512, so the order is the same in every process; hash() differs between processes.
    rng = random.Random(f"seed {seed}, epoch {epoch}")
    orders = [_shuffled(group, rng) for group in groups]
    chunks = _chunks(groups, questions_per_image or sys.maxsize)
    rng.shuffle(chunks)
    chunks.sort(key=lambda chunk: chunk.stage)
    return [_join(groups, orders, step) for step in _fill(chunks, samples_per_step)]


def _in_order(groups: Sequence[Group], samples_per_step: int) -> list[list[Group]]:
    """Steps of the next examples each, by their index."""
    places = [(index, n, member) for n, group in enumerate(groups) for member, index in enumerate(group.examples)]
    chunks = [Chunk(groups[n].stage, n, range(member, member + 1)) for _, n, member in sorted(places)]
    starts = range(0, len(chunks), samples_per_step)
    orders = [range(len(group.examples)) for group in groups]
    return [_join(groups, orders, chunks[start : start + samples_per_step]) for start in starts]


def _shuffled(group: Group, rng: random.Random) -> list[int]:
    """The positions of a group's examples in a random order, which does not depend on their order in the group."""
    members = sorted(range(len(group.examples)), key=group.examples.__getitem__)
    rng.shuffle(members)
    return members


def _chunks(groups: Sequence[Group], size: int) -> list[Chunk]:
    """The groups in chunks of `size` examples; the last chunk of a group may be smaller."""
    members = [range(len(group.examples)) for group in groups]
    return [
        Chunk(groups[number].stage, number, everyone[start : start + size])
        for number, everyone in enumerate(members)
        for start in everyone[::size]
    ]


def _fill(chunks: Sequence[Chunk], samples_per_step: int) -> list[list[Chunk]]:
    """Steps of equal size. A step starts with the first chunk that is left, whatever its size, so none waits long."""
    queue, steps = deque(chunks), []
    while queue:
        step = [_take(queue, 0, samples_per_step)]
        room = samples_per_step - len(step[0].members)
        while queue and room:
            step.append(_take(queue, _best_fit(queue, room), room))
            room -= len(step[-1].members)
        steps.append(step)
    return steps


def _take(queue: deque[Chunk], index: int, room: int) -> Chunk:
    """Remove the chunk at `index`, or what fits of it; the rest goes to the front of the queue."""
    chunk = queue[index]
    del queue[index]
    if len(chunk.members) > room:
        queue.appendleft(replace(chunk, members=chunk.members[room:]))
        chunk = replace(chunk, members=chunk.members[:room])
    return chunk


def _best_fit(queue: deque[Chunk], room: int) -> int:
    """The index of the first chunk if it fits, else of the largest that fits, the first of these; 0 if none fits.

    Chunks of later stages are not considered before this one has ended.
    """
    if len(queue[0].members) <= room:
        return 0
    ahead = takewhile(lambda chunk: chunk.stage == queue[0].stage, islice(queue, NUM_AHEAD))
    sizes = [len(chunk.members) for chunk in ahead]
    largest = max((size for size in sizes if size <= room), default=sizes[0])
    return sizes.index(largest)


def _join(groups: Sequence[Group], orders: Sequence[Sequence[int]], chunks: Sequence[Chunk]) -> list[Group]:
    """The chunks as groups; chunks of the same group are joined. `orders` are those of the groups' examples."""
    members: dict[int, list[int]] = {}
    for chunk in chunks:
        members.setdefault(chunk.group, []).extend(orders[chunk.group][member] for member in chunk.members)
    return [groups[number].subset(joined) for number, joined in members.items()]


PackedStep = tuple[int, list[Group], list[list[Pack]]]
"""A step: the number of its epoch, its groups, and the packs of each rank."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes: a pack, or some rows."""

    pack: Pack
    target_weights: tuple[float, ...]
    """For each example, in the order of the pack's groups: the weight of each of its targets in the step's loss."""
    epoch: int = 0


@dataclass(frozen=True)
class Sampler:
    """The steps of a training, for one of `num_ranks` ranks."""

    examples: Sequence[Example]
    groups: Sequence[Group]
    batch: BatchSection
    seed: int
    rank: int = 0
    num_ranks: int = 1

    @classmethod
    def of(
        cls, examples: Sequence[Example], image_token_id: int, batch: BatchSection, seed: int, **ranks: int
    ) -> Sampler:
        """The sampler of some examples; `ranks` are `rank` and `num_ranks`."""
        groups = [nested(group, examples) for group in group_examples(examples, image_token_id)]
        return cls(examples, groups, batch, seed, **ranks)

    def __len__(self) -> int:
        """Optimizer steps per epoch."""
        return num_steps(len(self.examples), self.batch.samples_per_step)

    def epoch(self, number: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of each step of an epoch; all ranks have equally many."""
        return (self._micro_batches(*step, self.rank) for step in self._packed_steps(number))

    def steps(self, start: int, end: int) -> Iterator[list[MicroBatch]]:
        """This rank's micro-batches of the steps `start` to `end` of a training, across its epochs."""
        return (self._micro_batches(*step, self.rank) for step in self._packed(start, end))

    def pack_lengths(self, number: int) -> list[int]:
        """The number of tokens of each pack of an epoch, on all ranks."""
        return [pack.num_tokens for *_, ranks in self._packed_steps(number) for packs in ranks for pack in packs]

    def upcoming(self, start: int, end: int) -> list[MicroBatch]:
        """All ranks' micro-batches of the steps `start` to `end`, or enough of them to know the lengths of packs."""
        steps = self._packed(start, end)
        micro_batches = (self._micro_batches(*step, rank) for step in steps for rank in range(self.num_ranks))
        return list(islice(chain.from_iterable(micro_batches), max(len(self), ENOUGH_PACKS) * self.num_ranks))

    def _packed(self, start: int, end: int) -> Iterator[PackedStep]:
        """The same of the steps `start` to `end` of a training."""
        first, skipped = divmod(start, len(self))
        return islice(chain.from_iterable(map(self._packed_steps, count(first))), skipped, skipped + end - start)

    def order(self, number: int) -> list[int]:
        """The examples of an epoch in the order of its steps; those of a group follow one another."""
        return [index for step in self._steps(number) for group in step for index in group.examples]

    def _steps(self, number: int) -> list[list[Group]]:
        batch, shuffle = self.batch, self.batch.order != "as_given"
        sizes = batch.samples_per_step, batch.questions_per_image
        return epoch_steps(self.groups, *sizes, self.seed, number, shuffle=shuffle)

    def _packed_steps(self, number: int) -> Iterator[PackedStep]:
        """The same with their packs."""
        return ((number, step, self._pack(step)) for step in self._steps(number))

    def _pack(self, step: list[Group]) -> list[list[Pack]]:
        """The packs, or batches of rows, of each rank."""
        if self.batch.mode != "shared":
            step = [group.subset([member]) for group in step for member in range(len(group.examples))]
        if self.batch.has_packs:
            return pack_step(step, self.batch.tokens_per_pack, self.num_ranks)
        rows = [group.whole(self.examples) for group in step]
        return row_batches(rows, self.batch.samples_per_forward, self.num_ranks)

    def _micro_batches(
        self, epoch: int, step: Sequence[Group], ranks: Sequence[Sequence[Pack]], rank: int
    ) -> list[MicroBatch]:
        """The packs of a rank with their target weights, which depend on the whole step."""
        samples = [index for group in step for index in group.examples]
        if self.batch.order == "as_given":
            samples.sort()  # as the files have them, and not by image
        # The loss is the mean of the means of these parts, both with the weights of `batch.balance`.
        size = {"token": len(samples), "sample": 1, "micro_batch": self.batch.samples_per_forward}[self.batch.loss]
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        weight = {index: self.examples[index].weight for index in samples}
        target_weights: dict[int, float] = {}
        for part in parts:
            num_parts = sum(weight.values()) / weight[part[0]] if size == 1 else len(parts)
            num_targets = sum(weight[index] * self.examples[index].num_targets for index in part)
            target_weights |= {index: weight[index] / (num_parts * (num_targets or 1)) for index in part}

        return [
            MicroBatch(pack, tuple(0.0 if pack.is_filler else target_weights[n] for n in pack.examples), epoch)
            for pack in ranks[rank]
        ]
