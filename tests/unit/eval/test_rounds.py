"""Rounds: every question once, questions about the same images together, and few images in memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.eval import answerer
from lookonce.eval.answerer import plan_rounds

SIZES = {"a": 10, "b": 40, "c": 60, "d": 0, "e": 300}


def planned(keys_of, limit):
    before, answerer.ROUND_TOKENS = answerer.ROUND_TOKENS, limit
    try:
        return plan_rounds(keys_of, SIZES.__getitem__)
    finally:
        answerer.ROUND_TOKENS = before


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from("abcde"), max_size=3).map(tuple)), st.integers(1, 400))
def test_questions_about_the_same_images_are_in_one_round_of_limited_size(prompts, limit):
    keys_of = {2 * number: keys for number, keys in enumerate(prompts)}
    found = planned(keys_of, limit)
    assert sorted(number for members in found for number in members) == sorted(keys_of)
    in_rounds = [[keys_of[number] for number in members] for members in found]
    for keys in set(prompts):
        assert sum(keys in members for members in in_rounds) == 1
    for members in in_rounds:
        shown = {frozenset(key for key in keys if SIZES[key]) for keys in members} - {frozenset()}
        everything = frozenset().union(*shown)
        assert sum(SIZES[key] for key in everything) <= limit or everything in shown


def test_questions_come_in_the_order_of_their_images():
    keys_of = dict(enumerate([("a",), ("b",), ("a",), ("c",), (), ("b",)]))
    assert planned(keys_of, 50) == [[0, 2, 1, 5], [3, 4]]
    assert plan_rounds({}, SIZES.__getitem__) == []
