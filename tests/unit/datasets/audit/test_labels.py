"""Labels are the same whatever their order, separators and case."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from support.strategies import TEXT

from lookonce.datasets.audit.labels import plain, same_labels


@given(st.lists(st.sampled_from(["red", "pink", "Flesh", "blue green"]), min_size=1), st.randoms(use_true_random=False))
def test_order_separators_and_case_leave_labels_the_same(labels, rng: random.Random):
    shuffled = rng.sample(labels, len(labels))
    written = rng.choice([";", "; ", " ; "]).join(label.upper() if rng.random() < 0.5 else label for label in shuffled)
    assert same_labels(written) == same_labels("; ".join(labels))


@given(TEXT)
def test_plain_text_stays_unchanged(text):
    assert plain(plain(text)) == plain(text)
