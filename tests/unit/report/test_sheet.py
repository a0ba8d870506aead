"""Which answers are shown: all kinds in turn, distinct images first, always the same."""

from __future__ import annotations

import random

from support.answers import questions, wrong

from lookonce.eval.join import Run
from lookonce.report.answers import NUM_SHOWN, draw_sheet


def run(name: str, rows) -> Run:
    return Run(name, list(rows), "", None)


def test_kinds_share_the_sheet_and_what_is_rare_is_shown_whole():
    sheet = draw_sheet([run("a", wrong(questions(20), 10))])
    assert [(kind.title, kind.num_questions, len(kind.rows)) for kind in sheet] == [
        ("Wrong", 10, 10),
        ("Right", 90, 38),
    ]
    assert sheet == draw_sheet([run("a", wrong(questions(20), 10))])
    assert len({row[0].images for row in sheet[1].rows[:18]}) == 18


def test_few_questions_are_all_shown_once():
    sheet = draw_sheet([run("a", questions(3))])
    assert [len(kind.rows) for kind in sheet] == [0, 15] and sum(len(kind.rows) for kind in sheet) < NUM_SHOWN


def test_answers_are_joined_whatever_their_order():
    rows = wrong(questions(), 7)
    mixed = random.Random(1).sample(rows, len(rows))
    sheet = draw_sheet([run("a", rows), run("b", mixed)])
    assert [kind.num_questions for kind in sheet] == [7, len(rows) - 7, 0, 0]
    assert all(one == other for kind in sheet for one, other in kind.rows)
