"""Problems of texts: labels, spelling, images."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rows import run
from support.strategies import TEXT

from lookonce.datasets.audit.findings import is_slip, is_swap, look_alikes, plain, same_labels


@given(st.lists(st.sampled_from(["red", "pink", "Flesh", "blue green"]), min_size=1), st.randoms(use_true_random=False))
def test_order_separators_and_case_leave_labels_the_same(labels, rng):
    shuffled = rng.sample(labels, len(labels))
    written = rng.choice([";", "; ", " ; "]).join(label.upper() if rng.random() < 0.5 else label for label in shuffled)
    assert same_labels(written) == same_labels("; ".join(labels))


@given(TEXT)
def test_plain_text_stays_unchanged(text):
    assert plain(plain(text)) == plain(text)


@pytest.mark.parametrize("part", ["\n", " ", "; ", "a;", "1 ", "1a", "e\u0301", "a ", "?", " ;\t"])
def test_an_audit_of_long_texts_takes_linear_time(folder, write, part):
    long = f"x{part * (200_000 // len(part))}x"
    path = write(("a.png", "Is it?", long), ("a.png", long, "a"))
    start = time.process_time()
    result = run("data", "audit", path, "--html", folder / "a.html")
    assert result.exit_code == 0 and time.process_time() - start < 3


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
