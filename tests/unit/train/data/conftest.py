"""Fixtures of training data: a source of features that name their image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch


class FakeSource:
    """Features of one level and one number per token, which names the image."""

    has_tower = False

    def __init__(self, tokens_of: Mapping[str, int]) -> None:
        self.tokens_of = tokens_of

    def grid_thw(self, key: str) -> tuple[int, int, int]:
        return (1, 2, 2 * self.tokens_of[key])

    def load(self, keys: Sequence[str], device: str = "cpu") -> torch.Tensor:
        return torch.cat([torch.full((self.tokens_of[key], 1, 1), float(ord(key))) for key in keys])


@pytest.fixture(scope="session")
def make_source() -> Callable[[Mapping[str, int]], FakeSource]:
    """Makes a source of images called by one letter, with the number of tokens of each."""
    return FakeSource
