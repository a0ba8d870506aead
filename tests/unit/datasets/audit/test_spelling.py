"""Likely misspellings: swaps and slips, but not inflection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.datasets.audit.findings import is_slip, is_swap, look_alikes

WORDS = st.text("abcdeimnrstu", min_size=5, max_size=9)


@given(WORDS, st.integers(0, 8))
def test_swapped_neighbours_are_a_swap_and_not_a_slip(word, index):
    index %= len(word) - 1
    swapped = word[:index] + word[index + 1] + word[index] + word[index + 2 :]
    assert is_swap(word, swapped) == (word != swapped) == is_swap(swapped, word)
    assert not is_swap(word, word) and not is_slip(word, swapped)


@given(WORDS, st.integers(0, 8), st.sampled_from("xyz"))
def test_one_other_letter_is_a_slip_unless_it_may_be_inflection(word, index, letter):
    index %= len(word)
    more, other = word[:index] + letter + word[index:], word[:index] + letter + word[index + 1 :]
    assert is_slip(word, more) == is_slip(more, word) == (index < len(more) - 2)
    assert is_slip(word, other) == (index < len(word) - 2)
    assert not is_slip(word, word)


@given(st.dictionaries(WORDS, st.integers(1, 100), max_size=30))
def test_the_index_finds_the_same_look_alikes_as_comparing_all_pairs(words):
    def related(word: str) -> int:
        return sum(number for other, number in words.items() if other.removesuffix("s") == word.removesuffix("s"))

    def misspelt(wrong: str, right: str) -> bool:
        swapped = is_swap(wrong, right) and related(right) > related(wrong)
        return swapped or (
            related(wrong) <= related(right) and is_slip(wrong, right) and words[right] >= 20 * words[wrong]
        )

    expected = {(wrong, right) for wrong in words for right in words if misspelt(wrong, right)}
    assert set(look_alikes(words)) == expected


@pytest.mark.parametrize(("one", "other"), [("polyp", "polyps"), ("detect", "detected"), ("visible", "visibly")])
def test_inflection_is_not_a_misspelling(one, other):
    assert not list(look_alikes({one: 100, other: 1}))
