"""The majority baseline: the most frequent training answer of each question."""

from __future__ import annotations

import tracemalloc

from lookonce.datasets.majority import Majority, MajorityInContext
from lookonce.datasets.records import Context, Record, Turn

ASKED = [("a", "1"), ("a", "2"), ("a", "2"), ("b", "3"), ("b", "3"), ("b", "3"), ("b", "1"), ("c", "4")]


def test_the_answer_is_the_most_frequent_one_of_each_question_and_of_equally_frequent_ones_the_first():
    majority = Majority.of_records([Record((), (Turn(*pair),)) for pair in ASKED])
    assert [majority.answer(question) for question in "abc"] == ["2", "3", "4"]
    assert Majority([("a", "2"), ("a", "1"), ("a", "1"), ("a", "2")]).answer("a") == "2"


def test_an_unknown_question_or_one_asked_too_seldom_gets_the_most_frequent_answer_of_all():
    assert Majority(ASKED).answer("never asked") == "3"
    assert Majority([]).answer("never asked") == ""
    assert [Majority(ASKED, min_asked).answer("c") for min_asked in (1, 2)] == ["4", "3"]


FIRST_YES, FIRST_NO = Turn("polyp?", "yes"), Turn("polyp?", "no")


def talks(number: int, *turns: tuple[str, str]) -> list[Record]:
    """The same conversation in some records."""
    return [Record((), tuple(Turn(*turn) for turn in turns))] * number


def test_given_the_context_it_is_the_most_frequent_answer_after_the_same_earlier_turns():
    asked = [(FIRST_YES, "2", 5), (FIRST_YES, "1", 1), (FIRST_NO, "0", 2), (FIRST_NO, "", 4)]
    records = [Record((), (first, Turn("how many?", answer))) for first, answer, number in asked for _ in range(number)]
    majority = MajorityInContext(iter(records))
    assert [majority.answer((first,), "how many?") for first in (FIRST_YES, FIRST_NO)] == ["2", ""]
    assert majority.answer((Turn("text?", "no"),), "how many?") == "2"  # of the question
    assert majority.answer((FIRST_NO,), "never asked") == "yes"  # of all


def test_the_same_turns_in_another_order_are_the_same_context():
    ahead = [("polyp?", "no"), ("text?", "no")]
    records = talks(1, *ahead, ("how many?", "0")) + talks(1, *ahead[::-1], ("how many?", "0"))
    records += talks(9, ("polyp?", "no"), ("how many?", "1")) + talks(9, ("text?", "no"), ("how many?", "1"))
    assert MajorityInContext(records).answer((Turn("text?", "no"), FIRST_NO), "how many?") == "0"
    assert MajorityInContext(records[1:]).answer((Turn("text?", "no"), FIRST_NO), "how many?") == "1"  # once


def test_after_other_turns_the_one_whose_question_tells_most_decides():
    records = talks(6, ("polyp?", "no"), ("how many?", "0")) + talks(8, ("polyp?", "yes"), ("how many?", "2"))
    records += talks(9, ("text?", "no"), ("how many?", "2")) + talks(8, ("text?", "no"), ("how many?", "0"))
    for other in "abcd":  # too seldom
        records += talks(1, (other, "x"), ("colour?", "red"), ("how many?", "9"))
    majority, others = MajorityInContext(records), (Turn("text?", "no"), Turn("colour?", "red"))
    for earlier in ((*others, FIRST_NO), (FIRST_NO, *others)):
        assert majority.answer(earlier, "how many?") == "0"
    assert majority.answer((Turn("text?", "no"), Turn("polyp?", "perhaps")), "how many?") == "2"
    assert majority.answer(others[1:], "how many?") == "2"  # of the question


def test_the_answers_of_a_context_come_before_the_turns():
    known = (Turn("a?", "no"),)
    records = [
        *[Record((), (Turn("b?", "none"), Turn("c?", "x")), context=Context(known))] * 5,
        *[Record((), (Turn("b?", "two"),))] * 6,
    ]
    found = MajorityInContext(records)
    assert (found.answer(known, "b?"), found.answer((), "b?"), Majority.of_records(records).answer("b?")) == (
        *("none", "two", "two"),
    )
    assert found.answer((*known, Turn("b?", "none")), "c?") == "x"


def test_the_memory_of_a_conversation_grows_with_its_turns_and_not_with_their_square():
    records = talks(2, *((f"Is it {number}?", "yes") for number in range(2000)), ("how many?", "2"))
    tracemalloc.start()
    majority = MajorityInContext(records)
    peak, _ = tracemalloc.get_traced_memory()[1], tracemalloc.stop()
    assert majority.answer(records[0].turns[:-1], "how many?") == "2"
    assert peak < 5e6  # 88 MB where each turn had those before it
