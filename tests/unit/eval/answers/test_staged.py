"""Which questions are answered together, and which answers the prompts of later ones have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lookonce.datasets.context import NOT_ANSWERED, ContextForm
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Context, Record, Turn
from lookonce.eval.answers.questions import (
    in_context,
    questions_of,
    stages_of,
    true_before,
    unanswered,
    with_true_answers,
)
from lookonce.eval.decoding.dialogue import Answer

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
    asked = questions_of(session(), RECORDS, "own")
    assert stages_of(session(), asked, "own") == [[2, 3, 4], [0, 1]]
    assert [turn for _, turn in asked] == [0, 1, 0, 0, 0] and not any(one.context for one, _ in asked)
    for staged, form in (("true", FORM), ("none", FORM), ("own", None)):
        assert stages_of(session(form), asked, staged) == [[0, 1, 2, 3, 4]]


def test_true_answers_are_those_of_the_records_and_none_are_none():
    true, none = (questions_of(session(), RECORDS, staged) for staged in ("true", "none"))
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
    asked = questions_of(session(), RECORDS, "own")
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


def test_the_majority_given_the_context_is_told_true_answers_where_the_model_is_told_its_own():
    asked = questions_of(session(), RECORDS, "own")
    answers = {number: answer("wrong") for number in range(5)}
    shown = in_context(session(), asked, range(5), answers)
    true = true_before(session(), shown)
    known = (Turn("a?", "true"), Turn("b?", "true"))
    assert true == [known, (*known, Turn("c?", "true")), (), (), ()]
    training = with_true_answers(session(), [record("easy", "a?"), record("easy", "b?"), record("hard", "d?")] * 5)
    training += [Record((), (Turn("d?", "of all"),))] * 9
    earlier = [(), (Turn("c?", "wrong"),), (), (), ()]
    examples = [SimpleNamespace(image_keys=("1",))] * 5
    rows = [*unanswered(shown, earlier, true, examples, training, "own", "own")]
    assert [row.majority_in_context for row in rows] == ["true", "true", None, None, None]
    assert rows[1].majority == "of all" and rows[1].earlier == earlier[1] and rows[1].context[0].answer == "wrong"
