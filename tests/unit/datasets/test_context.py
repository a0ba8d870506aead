"""Answers to earlier questions in prompts: which they are, how they are written, and which records lose them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lookonce.datasets.context import NOT_ANSWERED, ContextForm, as_shown, with_context
from lookonce.datasets.records import Context, Record, Turn
from lookonce.errors import RecordsError

FORM = ContextForm(by="stage", order=[1, 2, 3])
TURNS = ContextForm(by="stage", order=[1, 2, 3], form="turns")


def record(stage: object, question: str, answer: str = "yes", image: str = "a") -> Record:
    return Record((Path(image),) if image else (), (Turn(question, answer),), metadata={"stage": stage})


def keys_of(record: Record) -> tuple[str, ...]:
    """Two paths may be one image."""
    return tuple(path.name.removesuffix("-copy") for path in record.images)


def known(records: list[Record], form: ContextForm = FORM) -> list[tuple[Turn, ...]]:
    return [one.known for one in with_context(records, form, keys_of)]


def test_a_question_follows_the_answers_of_earlier_stages_about_the_same_image():
    records = [
        *(record(3, "e?"), record(2, "c?", "2"), record("1", "b?", "no", "a-copy"), record(1, "a?")),
        *(record(1, "x?", image="b"), record(2, "d?", image="b"), record(4, "f?"), record(None, "g?")),
    ]
    a, b, c, x = Turn("a?", "yes"), Turn("b?", "no"), Turn("c?", "2"), Turn("x?", "yes")
    assert known(records) == [(b, a, c), (b, a), (), (), (), (x,), (), ()]


def test_images_must_be_exactly_the_same_and_there_must_be_some():
    both = replace(record(2, "b?"), images=(Path("a"), Path("b")))
    assert known([record(1, "a?"), both, record(1, "a?", image=""), record(2, "b?", image="")]) == [()] * 4


STAGED = st.builds(
    record, st.sampled_from([1, 2, 3, 4]), st.sampled_from("pqr"), st.sampled_from("xy"), st.sampled_from("ab")
)


@settings(max_examples=50)
@given(st.lists(STAGED, max_size=12), st.sampled_from([FORM, TURNS]))
def test_no_question_is_told_its_own_answer_or_one_of_a_later_stage(records, form):
    """Each record's own answer says which record it is of, so that it is known wherever it is shown."""
    numbered = [replace(one, turns=(replace(one.turns[0], answer=str(n)),)) for n, one in enumerate(records)]
    for one, found in zip(numbered, with_context(numbered, form, keys_of), strict=True):
        assert found.turns == one.turns
        for turn in found.known:
            source = numbered[int(turn.answer)]
            assert form.stage_of(source) < form.stage_of(one) and source.images == one.images
            assert turn.question != one.turns[0].question


def test_a_summary_is_a_text_in_the_question_and_turns_stand_before_it():
    records = [record(1, "a {question}?", "two\n lines;  {answers}"), record(1, "b?"), record(2, "c?")]
    written = "Known so far: a {question}? two lines; {answers}; b? yes\nc?"
    shown = with_context(records, FORM, keys_of)[2].shown
    assert (shown.turns, shown.context) == ((Turn(written, "yes"),), None)
    in_turns = with_context(records, TURNS, keys_of)[2]
    assert in_turns.shown.turns == (records[0].turns[0], records[1].turns[0], Turn("c?", "yes"))
    assert (in_turns.num_given, with_context(records, FORM, keys_of)[2].num_given, records[0].num_given) == (2, 0, 0)
    own = ContextForm(by="stage", order=[1, 2], each="{answer}", template="{question} ({answers})")
    assert own.write([Turn("a?", "1"), Turn("b?", "2")], "c?") == Context(
        (Turn("a?", "1"), Turn("b?", "2")), "c? (1; 2)"
    )
    assert records[0].shown is records[0]


def test_the_same_answer_is_told_once():
    records = [record(1, "a?"), record(1, "a?"), record(1, "a?", "no"), record(2, "b?")]
    assert known(records)[3] == (Turn("a?", "yes"), Turn("a?", "no"))


def test_an_answer_that_is_empty_or_cut_off_is_not_shown():
    assert [as_shown(" two ", "stop"), as_shown("a", None), as_shown(" ", "stop"), as_shown("a", "length")] == [
        *("two", "a", NOT_ANSWERED, NOT_ANSWERED)
    ]


def test_a_stage_that_no_record_is_in_is_refused():
    with pytest.raises(RecordsError, match="`data.context`: no record has stage 3; values are 1, 2$"):
        FORM.check([record(1, "a?"), record(2, "b?")])
    with pytest.raises(RecordsError, match="no record has the field stage; `data.stage_map` gives records a stage"):
        FORM.check([Record((), (Turn("a?", "b"),))])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"order": [1]}, "at least 2 items"),
        ({"order": [1, "1"]}, "has 1 twice"),
        ({"each": "{question}"}, "must have {answer}, may have {question}, and nothing else in braces"),
        (
            {"template": "{answers} {question} {image}"},
            "must have {answers} and {question}, and nothing else in braces",
        ),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        ContextForm(**{"by": "stage", "order": [1, 2]} | values)
