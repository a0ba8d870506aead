"""Fixtures of training data: tokenizers, and a source of features that name their image."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from lookonce.datasets.sample.model import write_model
from lookonce.train.data.tokenize import ChatTokenizer


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


@pytest.fixture(scope="session")
def published_model(real_processor: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder with the published tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "model"
    write_model(folder, "tiny", tokenizer=real_processor, tower_only=True)
    return folder


@pytest.fixture(params=["tiny tokenizer", "published tokenizer"])
def model_folder(request, sample: Path) -> Path:
    return sample / "model" if request.param == "tiny tokenizer" else request.getfixturevalue("published_model")


@pytest.fixture
def chat_tokenizer(model_folder: Path) -> ChatTokenizer:
    """Tests must not change it: the published one takes a second to load."""
    return shared_chat_tokenizer(model_folder)


@functools.cache
def shared_chat_tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer(folder, AutoConfig.from_pretrained(folder))


@pytest.fixture
def own_chat_tokenizer(sample: Path) -> ChatTokenizer:
    """The sample's, for tests that change it."""
    return ChatTokenizer(sample / "model", AutoConfig.from_pretrained(sample / "model"))
