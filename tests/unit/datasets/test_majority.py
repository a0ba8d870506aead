"""The majority baseline: the most frequent training answer of each question."""

from __future__ import annotations

from lookonce.datasets.majority import Majority
from lookonce.datasets.records import Record, Turn

ASKED = [("a", "1"), ("a", "2"), ("a", "2"), ("b", "3"), ("b", "3"), ("b", "3"), ("b", "1"), ("c", "4")]


def test_the_answer_is_the_most_frequent_one_of_each_question_and_of_equally_frequent_ones_the_first():
    majority = Majority.of_records([Record((), (Turn(*pair),)) for pair in ASKED])
    assert [majority.answer(question) for question in "abc"] == ["2", "3", "4"]
    assert Majority([("a", "2"), ("a", "1"), ("a", "1"), ("a", "2")]).answer("a") == "2"


def test_an_unknown_question_or_one_asked_too_seldom_gets_the_most_frequent_answer_of_all():
    assert Majority(ASKED).answer("never asked") == "3"
    assert Majority([]).answer("never asked") == ""
    assert [Majority(ASKED, min_asked).answer("c") for min_asked in (1, 2)] == ["4", "3"]
