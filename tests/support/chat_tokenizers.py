"""Chat tokenizers: that of the sample's model, and the published one."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lookonce.train.data.tokenize import ChatTokenizer

NO_THOUGHTS = "<think>\\n\\n</think>\\n\\n"
PROMPT = (
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    f"{{%- if enable_thinking is false %}}{{{{ '{NO_THOUGHTS}' }}}}{{%- else %}}{{{{ '<think>\\n' }}}}{{%- endif %}}"
    "{%- endif %}"
)
ROLE = "message.role + '\\n'"
ANSWERED = f"{ROLE} + ('{NO_THOUGHTS}' if message.role == 'assistant' and loop.last else '')"


@pytest.fixture(scope="session")
def thinking_model(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's model with a template that thinks unless `enable_thinking` is false, as Qwen3.5's.

    Tests must not change it.
    """
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(sample / "model", folder)
    let_think(folder)
    return folder


def let_think(model: Path) -> None:
    """Change the template of one of the sample's models to one that thinks unless `enable_thinking` is false."""
    path = model / "chat_template.jinja"
    conversation, _ = path.read_text().split("{%- if add_generation_prompt")
    assert ROLE in conversation
    path.write_text(conversation.replace(ROLE, ANSWERED) + PROMPT)


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


def load(folder: Path) -> ChatTokenizer:
    from transformers import AutoConfig

    from lookonce.train.data.tokenize import ChatTokenizer

    return ChatTokenizer(folder, AutoConfig.from_pretrained(folder))


shared_chat_tokenizer = functools.cache(load)


@pytest.fixture
def own_chat_tokenizer(sample: Path) -> ChatTokenizer:
    """The sample's, for tests that change it."""
    return load(sample / "model")
