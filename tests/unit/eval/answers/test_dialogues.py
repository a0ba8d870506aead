"""Which questions follow the model's own answers, and which turns stand before each in its prompt."""

from __future__ import annotations

from pathlib import Path

from lookonce.datasets.context import NOT_ANSWERED
from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.questions import together, turns_before, without_answers
from lookonce.eval.decoding.dialogue import Answer

FIRST = Record((Path("a"),), (Turn("a?", "1"), Turn("b?", "2"), Turn("c?", "3")))
OTHER = Record((Path("a"),), (Turn("d?", "4"),))
ASKED = [(FIRST, 0), (FIRST, 1), (FIRST, 2), (OTHER, 0)]


def test_with_own_answers_the_questions_of_a_record_are_one_dialogue():
    assert together(ASKED, "own") == [[0, 1, 2], [3]]
    assert together(ASKED, "true") == [[0], [1], [2], [3]]


def test_a_question_that_is_asked_alone_follows_the_answers_of_its_record():
    alone = [(FIRST, 2), (OTHER, 0), (FIRST, 1), (FIRST, 2)]
    assert together(alone, "own") == [[0], [1], [2, 3]]
    changed = without_answers(alone, together(alone, "own"))
    assert changed[:2] == alone[:2]
    assert [turn.answer for turn in changed[3][0].turns] == ["1", NOT_ANSWERED, NOT_ANSWERED] and changed[3][1] == 2


def test_the_turns_before_a_question_have_the_answers_that_its_prompt_shows():
    answers = {
        0: Answer("yes", (5, 9), -1.0, "stop"),
        1: Answer("lef", (5, 6), -1.0, "length"),
        2: Answer("no", (5, 9), -1.0, "stop"),
        3: Answer("no", (5, 9), -1.0, "stop"),
    }
    earlier = turns_before(ASKED, together(ASKED, "own"), answers, [9])
    assert earlier == {0: (), 1: (Turn("a?", "yes"),), 2: (Turn("a?", "yes"), Turn("b?", NOT_ANSWERED)), 3: ()}
    earlier = turns_before(ASKED, together(ASKED, "true"), answers, [9])
    assert earlier == {0: (), 1: FIRST.turns[:1], 2: FIRST.turns[:2], 3: ()}


def test_an_answer_with_a_special_token_is_not_shown():
    answers = {0: Answer("yes", (5, 7, 9), -1.0, "stop"), 1: Answer("2", (5, 9), -1.0, "stop")}
    assert turns_before(ASKED, [[0, 1]], answers, [7, 9])[1] == (Turn("a?", NOT_ANSWERED),)
