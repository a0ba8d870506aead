"""Which examples make up each optimizer step of an epoch.

Design: a step has exactly `samples_per_step` examples, however many images these are about, so that the effective batch
is what the user says. The examples of a group stay together in chunks of at most `questions_per_image`, and chunks come
in random order. With 1 that is the classic random order of examples; with all, an image is looked at once an epoch, and
the cost is steps about fewer images.

A chunk that crosses the edge of a step would be cut there and its prefix run twice. So where the next chunk does not
fit, the largest that does among the next `NUM_AHEAD` goes first, and only if none does is the next one cut. What was
passed over begins the next step, so nothing waits for long. For 6,500 images, 38 % with 1 question, 29 % with 17 and
the rest with 8 to 16, an epoch runs 8,800 prefixes instead of 9,800 at 16 samples a step (17 never fit), and 6,500
instead of 6,900 at 128. The cost is an order that is not quite random: small chunks come some tens of places early.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from lookonce.train.data.groups import Group

NUM_AHEAD = 32
"""Chunks that are looked through for one that fits, the next one included."""


@dataclass(frozen=True)
class Chunk:
    """Some examples of a group that stay together."""

    group: int
    places: range
    """Of the examples in their group; a range is cut at no cost, however long."""


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
    """The steps of an epoch: parts of the groups, every example once, `samples_per_step` in each step but the last.

    `questions_per_image` is how many examples of a group stay together, None all of them; chance may bring more of them
    into one step, and then they share the prefix. Without `shuffle` the order is that of the groups.
    """
    chunk_size = questions_per_image or sys.maxsize
    if not shuffle:
        return _fill(groups, _chunks(groups, chunk_size), samples_per_step, num_ahead=1)
    # A text as seed goes through sha512, so the order is the same in every process, as that of hash() is not.
    rng = random.Random(f"seed {seed}, epoch {epoch}")
    groups = [_shuffled(group, rng) for group in groups]
    chunks = _chunks(groups, chunk_size)
    rng.shuffle(chunks)
    return _fill(groups, chunks, samples_per_step, NUM_AHEAD)


def _shuffled(group: Group, rng: random.Random) -> Group:
    places = list(range(len(group.examples)))
    rng.shuffle(places)
    return group.part(places)


def _chunks(groups: Sequence[Group], size: int) -> list[Chunk]:
    """The groups cut into chunks of `size` examples, the last of each may be smaller."""
    places = enumerate(range(len(group.examples)) for group in groups)
    return [Chunk(group, all_of[start : start + size]) for group, all_of in places for start in all_of[::size]]


def _fill(groups: Sequence[Group], chunks: Sequence[Chunk], samples_per_step: int, num_ahead: int) -> list[list[Group]]:
    """Steps of as many samples each; a step begins with the first chunk left, whatever its size, so none waits long."""
    queue, steps = deque(chunks), []
    while queue:
        step = [_take(queue, 0, samples_per_step)]
        room = samples_per_step - len(step[0].places)
        while queue and room:
            step.append(_take(queue, _best_fit(queue, room, num_ahead), room))
            room -= len(step[-1].places)
        steps.append(_join(groups, step))
    return steps


def _take(queue: deque[Chunk], place: int, room: int) -> Chunk:
    """What there is room for of the chunk at `place`; the rest of it goes to the front."""
    chunk = queue[place]
    del queue[place]
    if len(chunk.places) > room:
        queue.appendleft(Chunk(chunk.group, chunk.places[room:]))
        chunk = Chunk(chunk.group, chunk.places[:room])
    return chunk


def _best_fit(queue: deque[Chunk], room: int, num_ahead: int) -> int:
    """The place of the first chunk if it fits, else of the largest that does, the first of these; 0 if none does."""
    if len(queue[0].places) <= room:
        return 0
    sizes = [len(chunk.places) for chunk in islice(queue, num_ahead)]
    largest = max((size for size in sizes if size <= room), default=sizes[0])
    return sizes.index(largest)


def _join(groups: Sequence[Group], chunks: Sequence[Chunk]) -> list[Group]:
    """The chunks as groups, those of the same group as one."""
    places: dict[int, list[int]] = {}
    for chunk in chunks:
        places.setdefault(chunk.group, []).extend(chunk.places)
    return [groups[number].part(joined) for number, joined in places.items()]
