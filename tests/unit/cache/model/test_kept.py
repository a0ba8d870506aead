"""How many tokens are kept, and the grid by which a model divides them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.cache.model.kept import KeptTokens, num_kept


@pytest.mark.parametrize(("num_tokens", "keep", "expected"), [(9, 0.5, 4), (1, 0.1, 1), (0, 0.5, 0), (300, 0.25, 75)])
def test_the_number_is_rounded_and_at_least_one(num_tokens, keep, expected):
    assert num_kept(num_tokens, keep) == expected


@given(st.integers(0, 2**40))
def test_all_are_kept_by_default(num_tokens):
    assert num_kept(num_tokens, 1.0) == num_tokens


def test_the_stand_in_has_as_many_tokens():
    kept = KeptTokens(np.array([0, 3, 4], np.int32), (1, 4, 6), 2)
    assert math.prod(kept.stand_in) // kept.merge_size**2 == 3
