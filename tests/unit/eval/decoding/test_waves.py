"""Waves have each question once and fit into the buffer; each token has a place of its own, with room behind it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.eval.decoding.branches import UNUSED
from lookonce.eval.decoding.layout import WaveLayout
from lookonce.eval.decoding.waves import Room, plan_waves
from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.groups import group_examples
from lookonce.train.data.tokenize import Example

quick = settings(deadline=None, database=None, max_examples=40)
START, IMAGE, END = 97, 98, 99
GRIDS = {"a": (1, 4, 4), "b": (1, 2, 6)}


def question(image: str, words: list[int]) -> Example:
    token_ids = [7, *([START, IMAGE, END] if image else []), *words, 8]
    sizes = tuple(t * h * w // 4 for t, h, w in [GRIDS[image]] if image) if image else ()
    return Example(
        np.array(token_ids, np.int32), np.zeros(len(token_ids), bool), (image,) if image else (), sizes, "a record"
    )


QUESTIONS = st.lists(
    st.builds(question, st.sampled_from(["", "a", "b"]), st.lists(st.integers(1, 3), max_size=5)),
    min_size=1,
    max_size=12,
)
ROOMS = st.builds(Room, st.integers(1, 120), st.integers(1, 60), st.integers(1, 6))


@quick
@given(QUESTIONS, ROOMS)
def test_each_question_is_in_one_wave_and_waves_fit_unless_one_question_does_not(examples, room):
    waves = plan_waves(examples, IMAGE, room)
    assert sorted(number for wave in waves for number in wave) == list(range(len(examples)))
    for wave in waves:
        groups = group_examples([examples[number] for number in wave], IMAGE)
        needed = sum(room.places_of(group) for group in groups)
        assert needed <= room.num_places or len(wave) == 1


@quick
@given(QUESTIONS, ROOMS)
def test_tokens_and_the_room_for_answers_have_places_of_their_own(examples, room):
    num_places, num_segments = 1, 0
    seen: list[int] = []
    wave = WaveLayout.of(examples, IMAGE, room)
    for pack, layout in zip(wave.packs, wave.of_packs, strict=True):
        batch = PackCollator(IMAGE, 0, 2, GRIDS.__getitem__)(
            pack.groups, examples, [0.0] * pack.num_samples, pack.num_tokens
        )
        segments = batch["segment"].numpy() + num_segments
        assert (layout.segments[layout.places - num_places] == segments).all(), "as the collator numbers them"
        assert (layout.branch == segments[layout.last]).all()
        assert (layout.prefix == batch["prefix"].numpy()[layout.last] + num_segments).all()
        assert len(set(layout.places)) == len(layout.places) == pack.num_tokens
        for place, branch in zip(layout.places[layout.last], layout.branch, strict=True):
            room_behind = np.arange(place + 1, place + 1 + room.max_new_tokens) - num_places
            assert (layout.segments[room_behind] == branch).all()
            assert not set(room_behind + num_places) & set(layout.places)
        seen += layout.examples.tolist()
        num_places += len(layout.segments)
        num_segments += sum(1 + len(group.examples) for group in pack.groups)
    assert sorted(seen) == list(range(len(examples))) and UNUSED not in seen and len(wave.segments) == num_places


def test_a_wave_does_not_depend_on_the_waves_after_it():
    examples = [question("a", [1, word, 2]) for word in range(9)]
    room = Room(40, 100, 4)
    waves = plan_waves(examples, IMAGE, room)
    assert len(waves) > 2
    assert plan_waves(examples[: len(waves[0])], IMAGE, room) == waves[:1]
