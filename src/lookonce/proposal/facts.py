"""What a first run file is proposed from: the records, their images, the model and the machine.

Design: the training records are all read, since their order would bias a sample of the questions an image has. So are
the images in the rows of parquet files, which may repeat one in each row: that takes about as long as reading the file.
Sizes of images and lengths of texts come from at most a thousand records, spread over all. The model need not be on
this machine: then a byte of text counts as one token, the most that its tokenizer makes of it.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.cache.build.progress import planned_tokens
from lookonce.cache.format import STORAGE
from lookonce.checks.template import without_thinking
from lookonce.datasets.images import count_images, image_size, read_many
from lookonce.datasets.records import Record
from lookonce.disk_space import free_bytes
from lookonce.environment import gpu_gb
from lookonce.errors import ImageError, LookonceError, ModelError
from lookonce.families.lookup import family_of
from lookonce.hub import locate
from lookonce.run.config import RunFile
from lookonce.run.records import read_split
from lookonce.train.data.token_stats import TokenCounter
from lookonce.train.model.gpu_memory import measured_name

NUM_SAMPLED = 1000
PIXELS_PER_TOKEN = 32 * 32
"""Pixels of one visual token of Qwen3-VL."""
IMAGE_TOKENS = (64, 16_384)
"""The fewest and the most tokens of an image by Qwen3-VL's own limits."""
TOKENS_PER_TURN = 32
"""Tokens of the chat template around a question and its answer, where the tokenizer is not known."""


@dataclass(frozen=True)
class Sampled:
    """One of the sampled records."""

    num_text_tokens: int
    image_tokens: tuple[int, ...]
    """Tokens of each of its images that can be read, by the model's own limits."""

    @property
    def num_tokens(self) -> int:
        return self.num_text_tokens + sum(self.image_tokens)


@dataclass(frozen=True)
class Facts:
    """All that the proposals depend on."""

    num_records: int
    num_images: int
    """Images that the training records show: files, members of tar files, and distinct images in parquet files."""
    sampled: tuple[Sampled, ...]
    num_unreadable: int
    """Images of the sampled records that cannot be read."""
    has_tokenizer: bool
    pixels_per_token: int
    measured: str | None
    """The model whose GPU memory was measured and that this one is; None if it is another."""
    bytes_per_token: int | None
    """Bytes of a visual token's features in bfloat16; None if the model is not on this machine."""
    has_linear_attention: bool
    """Whether the model has layers of linear attention; False if it is not on this machine."""
    thinks: bool
    """Whether training needs `enable_thinking: false` for its chat template; False if it is not on this machine."""
    gpu_gb: float | None
    num_cores: int
    free_bytes: int
    """Free bytes where the cache will be."""

    @property
    def samples_per_image(self) -> float:
        return self.num_records / max(self.num_images, 1)

    def cache_bytes(self, max_pixels: int | None) -> int | None:
        """Bytes of all images' features in bfloat16, by the sampled ones; None if the model's shape is not known."""
        limit = max_pixels // self.pixels_per_token if max_pixels else IMAGE_TOKENS[1]
        tokens = [min(number, limit) for one in self.sampled for number in one.image_tokens]
        if self.bytes_per_token is None or not tokens:
            return None
        return round(sum(tokens) / len(tokens) * self.num_images * self.bytes_per_token)


def find_facts(run: RunFile, gpu_memory_gb: float | None = None) -> Facts:
    """Look at the training records of a run, its model and this machine; nothing is downloaded.

    Raises:
        RecordsError: the records cannot be read.
    """
    records = list(read_split(run, "train"))
    config, counter, thinks = _model(run)
    sample = records[:: max(len(records) // NUM_SAMPLED, 1)][:NUM_SAMPLED]
    tokens, num_unreadable = _image_tokens(sample, counter)
    sampled = tuple(
        Sampled(_text_tokens(record, counter), tuple(tokens[path] for path in record.images if path in tokens))
        for record in sample
    )
    return Facts(
        num_records=len(records),
        num_images=count_images({path for record in records for path in record.images}),
        sampled=sampled,
        num_unreadable=num_unreadable,
        has_tokenizer=counter is not None,
        pixels_per_token=_pixels_per_token(counter),
        measured=measured_name(run.model.path, config),
        bytes_per_token=_bytes_per_token(config),
        has_linear_attention=config is not None and "linear_attention" in family_of(config).layer_types,
        thinks=thinks,
        gpu_gb=gpu_memory_gb or gpu_gb(),
        num_cores=len(os.sched_getaffinity(0)),
        free_bytes=free_bytes(run.cache.dir),
    )


def _model(run: RunFile) -> tuple[Any, TokenCounter | None, bool]:
    """The configuration and the tokenizer of the model, those that are on this machine; and whether it thinks."""
    from transformers import AutoConfig

    config, counter, told = None, None, None
    with contextlib.suppress(ModelError, OSError, ValueError):
        folder = locate(run.model.path, run.model.revision, is_local=True)
        counter = TokenCounter(folder)
        told = without_thinking(folder, counter)
        config = AutoConfig.from_pretrained(folder)
    return config, told or counter, told is not None


def _pixels_per_token(counter: TokenCounter | None) -> int:
    settings = counter.processor.settings if counter else None
    return (settings["patch_size"] * settings["merge_size"]) ** 2 if settings else PIXELS_PER_TOKEN


def _image_tokens(records: list[Record], counter: TokenCounter | None) -> tuple[dict[Path, int], int]:
    """The tokens of each image that can be read, and how many cannot."""
    paths = list(dict.fromkeys(path for record in records for path in record.images))
    found = {}
    for path, data in read_many(paths):
        size = None if isinstance(data, ImageError) else image_size(data)
        if size:
            found[path] = planned_tokens(counter.processor, size) if counter else _tokens_of(*size)
    return found, len(paths) - len(found)


def _tokens_of(width: int, height: int) -> int:
    least, most = IMAGE_TOKENS
    return min(max(-(-width * height // PIXELS_PER_TOKEN), least), most)


def _text_tokens(record: Record, counter: TokenCounter | None) -> int:
    try:
        if counter:
            return counter.example(record, [""] * len(record.images), [0] * len(record.images)).num_tokens
    except LookonceError:  # `lookonce check` says what is wrong with it
        pass
    texts = [text for turn in record.turns for text in (turn.question, turn.answer)] + [record.system or ""]
    return sum(len(text.encode()) for text in texts) + TOKENS_PER_TURN * (len(record.turns) + 1)


def _bytes_per_token(config: Any) -> int | None:
    if config is None:
        return None
    return STORAGE["bfloat16"].bytes_per_token(*family_of(config).feature_shape(config.vision_config))
