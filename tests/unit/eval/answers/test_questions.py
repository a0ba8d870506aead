"""The questions of an evaluation: dialogues, stages, baselines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.datasets.context import NOT_ANSWERED, ContextForm
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Context, Record, Turn
from lookonce.eval.answers.accuracy import draw
from lookonce.eval.answers.questions import (
    dialogue_numbers,
    in_context,
    questions_of,
    shuffle_images,
    stages_of,
    turns_before,
    without_answers,
)
from lookonce.eval.decoding.dialogue import Answer

FIRST = Record((Path("a"),), (Turn("a?", "1"), Turn("b?", "2"), Turn("c?", "3")))
OTHER = Record((Path("a"),), (Turn("d?", "4"),))
ASKED = [(FIRST, 0), (FIRST, 1), (FIRST, 2), (OTHER, 0)]


def test_with_own_answers_the_questions_of_a_record_are_one_dialogue():
    assert dialogue_numbers(ASKED, "predicted") == [[0, 1, 2], [3]]
    assert dialogue_numbers(ASKED, "reference") == [[0], [1], [2], [3]]
    alone = [(FIRST, 2), (OTHER, 0), (FIRST, 1), (FIRST, 2)]
    assert dialogue_numbers(alone, "predicted") == [[0], [1], [2, 3]]
    changed = without_answers(alone, dialogue_numbers(alone, "predicted"))
    assert changed[:2] == alone[:2]
    assert [turn.answer for turn in changed[3][0].turns] == ["1", NOT_ANSWERED, NOT_ANSWERED] and changed[3][1] == 2


def test_the_turns_before_a_question_have_the_answers_that_its_prompt_shows():
    answers = {
        0: Answer("yes", (5, 9), -1.0, "stop"),
        1: Answer("lef", (5, 6), -1.0, "length"),
        2: Answer("no", (5, 9), -1.0, "stop"),
        3: Answer("no", (5, 9), -1.0, "stop"),
    }
    earlier = turns_before(ASKED, dialogue_numbers(ASKED, "predicted"), answers, [9])
    assert earlier == {0: (), 1: (Turn("a?", "yes"),), 2: (Turn("a?", "yes"), Turn("b?", NOT_ANSWERED)), 3: ()}
    special = {0: Answer("yes", (5, 7, 9), -1.0, "stop")}
    assert turns_before(ASKED, [[0, 1]], answers | special, [7, 9])[1] == (Turn("a?", NOT_ANSWERED),)
    earlier = turns_before(ASKED, dialogue_numbers(ASKED, "reference"), answers, [9])
    assert earlier == {0: (), 1: FIRST.turns[:1], 2: FIRST.turns[:2], 3: ()}


FORM = ContextForm(by="stage", order=["easy", "hard"], template="{question} {answers}")
KEYS = ImageIndex({Path("a"): "1", Path("a-copy"): "1", Path("b"): "2"}, {})


def session(form: ContextForm | None = FORM) -> SimpleNamespace:
    run = SimpleNamespace(data=SimpleNamespace(context=form))
    chat = SimpleNamespace(special_tokens=["<|im_end|>"])
    return SimpleNamespace(run=run, images=KEYS, chat_tokenizer=chat)


def record(stage: str | None, *questions: str, image: str = "a") -> Record:
    turns = tuple(Turn(question, "true") for question in questions)
    return Record((Path(image),), turns, metadata={"stage": stage}, context=Context((Turn("old?", "old"),)))


RECORDS = [record("hard", "c?", "d?"), record("easy", "a?"), record(None, "x?"), record("easy", "b?", image="a-copy")]


def answer(text: str, ended: str = "stop") -> Answer:
    return Answer(text, (1, 2), -1.0, ended)


def test_with_own_answers_a_stage_is_asked_after_the_one_before():
    asked = questions_of(session(), RECORDS, "predicted")
    assert stages_of(session(), asked, "predicted") == [[2, 3, 4], [0, 1]]
    assert [turn for _, turn in asked] == [0, 1, 0, 0, 0] and not any(one.context for one, _ in asked)
    for staged, form in (("reference", FORM), ("none", FORM), ("predicted", None)):
        assert stages_of(session(form), asked, staged) == [[0, 1, 2, 3, 4]]
    true, none = (questions_of(session(), RECORDS, staged) for staged in ("reference", "none"))
    assert [one.known for one, _ in true] == [(Turn("a?", "true"), Turn("b?", "true"))] * 2 + [()] * 3
    assert not any(one.context for one, _ in none)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (answer(" two\n"), "two"),
        (answer("tw", "length"), NOT_ANSWERED),
        (answer("  "), NOT_ANSWERED),
        (answer("a<|im_end|>"), NOT_ANSWERED),
    ],
)
def test_a_later_question_is_told_what_the_model_answered(given, shown):
    asked = questions_of(session(), RECORDS, "predicted")
    answers = {2: given, 3: answer("x"), 4: answer("no")}
    found = in_context(session(), asked, [0, 1], answers)
    assert [(one.known, turn) for one, turn in found] == [
        ((Turn("a?", shown), Turn("b?", "no")), 0),
        ((Turn("a?", shown), Turn("b?", "no")), 1),
    ]
    assert found[0][0] is found[1][0], "the questions of one record remain one dialogue"
    assert found[0][0].shown.turns[0].question == f"c? a? {shown}; b? no"
    everything = in_context(session(), asked, range(5), answers | {0: answer("c"), 1: answer("d")})
    assert everything[:2] == found and not any(one.context for one, _ in everything[2:])


@pytest.mark.parametrize("num_images", [2, 10])
def test_every_shuffled_image_has_other_content(num_images):
    """Also where two files have the same bytes."""
    key_of = {Path(f"{number}{suffix}.jpg"): str(number) for number in range(num_images) for suffix in ("", "-copy")}
    images = ImageIndex(key_of, {key: path for path, key in key_of.items()})
    records = [Record((path,), (Turn("q", str(path)),), origin=str(path)) for path in images.key_of]
    shuffled = shuffle_images(records, images)
    pairs = list(zip(records, shuffled, strict=True))
    assert all(images.key_of[a.images[0]] != images.key_of[b.images[0]] for a, b in pairs)
    assert {images.key_of[r.images[0]] for r in shuffled} == set(images.path_of)
    assert all((a.turns, a.origin) == (b.turns, b.origin) for a, b in pairs)


DRAWN = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=2, unique=True), st.integers(1, 4)), min_size=1)


@given(DRAWN, st.integers(1, 30), st.integers(0, 3))
def test_a_part_has_whole_images_and_at_most_as_many_questions(drawn, most, seed):
    records = [SimpleNamespace(number=number, turns=[None] * turns) for number, (_, turns) in enumerate(drawn)]
    images = [[str(image) for image in some] for some, _ in drawn]
    part = draw(records, images, most, seed)
    numbers = [record.number for record in part]
    assert numbers == sorted(set(numbers)) and numbers
    of_image = Counter(image for some in images for image in some)
    chosen = Counter(image for number in numbers for image in images[number])
    assert all(of_image[image] == number for image, number in chosen.items())
    num_questions = sum(len(record.turns) for record in part)
    assert num_questions <= most or draw(part, [images[number] for number in numbers], 1, seed) == part
    assert draw(records, images, most, seed) == part
    assert most < sum(turns for _, turns in drawn) or part == records
