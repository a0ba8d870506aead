"""What all unit tests have in common."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lookonce.train.data.tokenize import ChatTokenizer

NUMBERS = itertools.count()
"""The numbers of the tests' folders."""


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Unit tests do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def published_model(real_processor: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder with the published tokenizer."""
    from lookonce.datasets.sample.model import write_model

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
    from transformers import AutoConfig

    from lookonce.train.data.tokenize import ChatTokenizer

    return ChatTokenizer(folder, AutoConfig.from_pretrained(folder))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own, as pytest's, which lists the folders of all tests each time to number the next."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(NUMBERS)}"
    path.mkdir(mode=0o700)
    return path
