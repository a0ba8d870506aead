"""The majority baseline: the most frequent training answer of each question."""

from __future__ import annotations

import pytest

from lookonce.datasets.majority import Majority, MajorityInContext
from lookonce.datasets.records import Context, Record, Turn

ASKED = [("a", "1"), ("a", "2"), ("a", "2"), ("b", "3"), ("b", "3"), ("b", "3"), ("b", "1"), ("c", "4")]


def test_the_answer_is_the_most_frequent_one_of_each_question():
    majority = Majority.of_records([Record((), (Turn(*pair),)) for pair in ASKED])
    assert [majority.answer(question) for question in "abc"] == ["2", "3", "4"]


def test_an_unknown_question_gets_the_most_frequent_answer_of_all():
    assert Majority(ASKED).answer("never asked") == "3"
    assert Majority([]).answer("never asked") == ""


@pytest.mark.parametrize(("min_asked", "expected"), [(1, "4"), (2, "3")])
def test_a_question_asked_too_seldom_counts_as_unknown(min_asked, expected):
    assert Majority(ASKED, min_asked).answer("c") == expected


def test_the_first_of_equally_frequent_answers_counts():
    assert Majority([("a", "2"), ("a", "1"), ("a", "1"), ("a", "2")]).answer("a") == "2"


def test_given_the_context_it_is_the_most_frequent_answer_after_the_same_earlier_turns():
    first_yes, first_no = Turn("polyp?", "yes"), Turn("polyp?", "no")
    asked = [(first_yes, "2"), (first_yes, "2"), (first_yes, "1"), (first_no, "0"), (first_no, ""), (first_no, "")]
    records = [Record((), (first, Turn("how many?", answer))) for first, answer in asked]
    majority = MajorityInContext(iter(records))
    assert [majority.answer((first,), "how many?") for first in (first_yes, first_no)] == ["2", ""]
    assert majority.answer((Turn("text?", "no"),), "how many?") == "2"  # of the question
    assert majority.answer((first_no,), "never asked") == "yes"  # of all


def test_the_answers_of_a_context_come_before_the_turns():
    known = (Turn("a?", "no"),)
    records = [
        Record((), (Turn("b?", "none"), Turn("c?", "x")), context=Context(known)),
        *[Record((), (Turn("b?", "two"),))] * 2,
    ]
    found = MajorityInContext(records)
    assert (found.answer(known, "b?"), found.answer((), "b?"), Majority.of_records(records).answer("b?")) == (
        *("none", "two", "two"),
    )
    assert found.answer((*known, Turn("b?", "none")), "c?") == "x"
