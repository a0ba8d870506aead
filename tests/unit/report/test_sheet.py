"""Which answers are shown: all kinds in turn, distinct images first, always the same."""

from __future__ import annotations

import random
from dataclasses import replace

from support.answers import questions, wrong

from lookonce.eval.join import Run
from lookonce.report.answers import NUM_DRAWN, NUM_SHOWN, draw_sheet, questions_over_time
from lookonce.run.log_file import DrawnQuestion


def run(name: str, rows) -> Run:
    return Run(name, list(rows), "", None)


def test_kinds_share_the_sheet_and_what_is_rare_is_shown_whole():
    sheet = draw_sheet([run("a", wrong(questions(20), 10))])
    assert {title: (number, len(rows)) for title, (number, rows) in sheet.items()} == {
        "Wrong": (10, 10),
        "Right": (90, 38),
    }
    assert sheet == draw_sheet([run("a", wrong(questions(20), 10))])
    assert len({row[0].images for row in sheet["Right"][1][:18]}) == 18


def test_few_questions_are_all_shown_once():
    sheet = draw_sheet([run("a", questions(3))])
    assert [len(rows) for _, rows in sheet.values()] == [0, 15] and NUM_SHOWN > 15


def test_answers_are_joined_whatever_their_order():
    rows = wrong(questions(), 7)
    mixed = random.Random(1).sample(rows, len(rows))
    sheet = draw_sheet([run("a", rows), run("b", mixed)])
    assert [number for number, _ in sheet.values()] == [7, len(rows) - 7, 0, 0]
    assert all(one == other for _, drawn in sheet.values() for one, other in drawn)


def test_drawn_questions_that_come_again_are_shown_early_and_late_and_then_others_of_both_ends():
    lines = [DrawnQuestion(step, f"{step}", [], "q", [], []) for step in range(100)]
    again = [replace(lines[step], step=step + distance) for step, distance in ((3, 5), (4, 90), (4, 40))]
    shown = [[line.step for line in asked] for asked in questions_over_time([*reversed(lines), *again])]
    assert shown == [[4, 94], [3, 8], [0], [1], [2], [97], [98], [99]] and len(shown) == NUM_DRAWN
    assert questions_over_time(lines[:2]) == [lines[:1], lines[1:2]] and questions_over_time([]) == []
