"""Choose the examples of each optimizer step of an epoch.

Design: a step has exactly `samples_per_step` examples, however many images they are about, so the effective batch size
is what the user sets. The examples of a group stay together in chunks of at most `questions_per_image`, and chunks are
shuffled. With 1, this is the usual random order of examples. Without a limit, each image is processed once per epoch;
the cost is that a step is about fewer images.

A chunk that crosses the end of a step would be split, and its prefix processed twice. So if the next chunk does not
fit, the largest of the next `NUM_AHEAD` chunks that fits goes first. The next chunk is split only if none fits. A chunk
that was passed over starts the next step, so none waits for long. With 6,500 images, 38 % with 1 question, 29 % with 17
and the rest with 8 to 16, an epoch processes 8,800 prefixes instead of 9,800 at 16 samples per step (17 never fit), and
6,500 instead of 6,900 at 128. The cost is an order that is not quite random: small chunks move forward by some tens of
positions.

With lessons, the chunks of each are shuffled among themselves, and none goes before the rest of an earlier lesson.
Steps keep their size, so a step may hold the end of one lesson and the beginning of the next. The cost is a prefix for
each lesson in which an image has questions.

Without shuffling, each step has the next examples of the files, whatever their images. Those about one image share the
prefix if they are in one step; an image whose questions are scattered over the files is processed many times.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from lookonce.train.data.groups import Group

NUM_AHEAD = 32
"""Number of chunks that are searched for one that fits, the next one included."""


@dataclass(frozen=True)
class Chunk:
    """Some examples of a group that stay together."""

    lesson: int
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
    chunks.sort(key=lambda chunk: chunk.lesson)
    return [_join(groups, orders, step) for step in _fill(chunks, samples_per_step)]


def _in_order(groups: Sequence[Group], samples_per_step: int) -> list[list[Group]]:
    """Steps of the next examples each, by their index."""
    places = [(index, n, member) for n, group in enumerate(groups) for member, index in enumerate(group.examples)]
    chunks = [Chunk(groups[n].lesson, n, range(member, member + 1)) for _, n, member in sorted(places)]
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
        Chunk(groups[number].lesson, number, everyone[start : start + size])
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

    Chunks of later lessons are not considered before this one has ended.
    """
    if len(queue[0].members) <= room:
        return 0
    ahead = takewhile(lambda chunk: chunk.lesson == queue[0].lesson, islice(queue, NUM_AHEAD))
    sizes = [len(chunk.members) for chunk in ahead]
    largest = max((size for size in sizes if size <= room), default=sizes[0])
    return sizes.index(largest)


def _join(groups: Sequence[Group], orders: Sequence[Sequence[int]], chunks: Sequence[Chunk]) -> list[Group]:
    """The chunks as groups; chunks of the same group are joined. `orders` are those of the groups' examples."""
    members: dict[int, list[int]] = {}
    for chunk in chunks:
        members.setdefault(chunk.group, []).extend(orders[chunk.group][member] for member in chunk.members)
    return [groups[number].subset(joined) for number, joined in members.items()]
