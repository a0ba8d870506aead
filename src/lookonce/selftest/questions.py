"""Random questions about random images, in packs and in rows.

Design: examples are made of token ids and features are drawn, so that no tokenizer, image or cache is needed. From
there on they take the path of training: sampler, packing, collator. The questions of an image begin alike, so the
prefix reaches into them; some of them share more than that. There are images of few and of 2,000 tokens, several in one
question, and questions without one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from lookonce.bench.variants import StockCollator
from lookonce.cache.format import Grid
from lookonce.run.sections.batch import BatchSection
from lookonce.train.data.batches import CPU, Batch, BatchMaker, RowCollator
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.data.tokenize import Example

SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IDS = {token: number for number, token in enumerate(SPECIAL)}
VOCABULARY = 512
NUM_LEVELS = 4
"""Levels of the features: the merged output and three of DeepStack."""
MERGE_SIZE = 2
ImageSizes = tuple[int, int]
"""Height and width of an image in tokens."""


@dataclass(frozen=True)
class Questions:
    """How many questions about which images are made."""

    images: tuple[ImageSizes, ...]
    num_questions: tuple[int, ...]
    """Questions about each image, and about the last two together; as many have no image as the last number says."""
    tokens_per_pack: int
    samples_per_step: int


class RandomFeatures:
    """Features that are drawn from the image's name, as a `FeatureSource`."""

    has_tower: ClassVar[bool] = False

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden

    def grid_thw(self, key: str) -> Grid:
        height, width = map(int, key.split("x"))
        return 1, height * MERGE_SIZE, width * MERGE_SIZE

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        return torch.cat([self._draw(key) for key in keys]).to(device)

    def _draw(self, key: str) -> torch.Tensor:
        height, width = map(int, key.split("x"))
        generator = torch.Generator().manual_seed(height * 1000 + width)
        return torch.randn(height * width, NUM_LEVELS, self.hidden, generator=generator).bfloat16()


def random_examples(questions: Questions, seed: int = 0) -> list[Example]:
    """The questions about each image, then those about the last two images, then those about none."""
    rng = random.Random(seed)
    shown: list[tuple[ImageSizes, ...]] = [(size,) for size in questions.images]
    shown += [questions.images[-2:], ()]
    numbers = (*questions.num_questions, questions.num_questions[-1])
    return [_example(rng, images) for images, number in zip(shown, numbers, strict=True) for _ in range(number)]


def _example(rng: random.Random, images: tuple[ImageSizes, ...]) -> Example:
    first = IDS["<|im_end|>"], *range(10, 14)
    image = [IDS[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end")]
    known = range(22, 22 + rng.choice([0, 0, 3, 7]))  # questions that begin alike have one more level of prefix, or two
    question = [20, 21, *known, *_words(rng, rng.randint(1, 20))]
    answer = [*_words(rng, rng.randint(1, 6)), IDS["<|im_end|>"]]
    token_ids = np.array([*first, *image * len(images), *question, *answer], dtype=np.int32)
    supervised = np.arange(len(token_ids)) >= len(token_ids) - len(answer)
    keys = tuple(f"{height}x{width}" for height, width in images)
    return Example(token_ids, supervised, keys, tuple(height * width for height, width in images), "self-test")


def _words(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(30, VOCABULARY) for _ in range(number)]


def make_batches(questions: Questions, hidden: int, device: torch.device) -> BatchMaker:
    """What makes batches of the questions; packs are padded to whole blocks."""
    batch = BatchSection(samples_per_step=questions.samples_per_step, tokens_per_pack=questions.tokens_per_pack)
    tokenizer = SimpleNamespace(pad_token_id=IDS["<|endoftext|>"])
    chat: Any = SimpleNamespace(image_token_id=IDS["<|image_pad|>"], merge_size=MERGE_SIZE, tokenizer=tokenizer)
    sampler = Sampler.of(random_examples(questions), chat.image_token_id, batch, seed=1)
    return BatchMaker(sampler, chat, RandomFeatures(hidden), device, pads_to_blocks=True)


def stock_rows(batch_maker: BatchMaker, micro_batch: MicroBatch, rows_per_pass: int) -> Iterator[Batch]:
    """The questions of a pack as padded rows with labels, in random order, as stock training has them.

    `num_items_in_batch` is the number of targets of the whole step, by which transformers divides the sum of losses.
    """
    examples = [batch_maker.sampler.examples[index] for group in micro_batch.pack.groups for index in group.examples]
    random.Random(0).shuffle(examples)
    chat = batch_maker.chat_tokenizer
    collate = StockCollator(RowCollator(batch_maker.source, chat.image_token_id, chat.tokenizer.pad_token_id))
    num_targets = torch.tensor(1 / micro_batch.target_weights[0])
    for start in range(0, len(examples), rows_per_pass):
        batch = collate(examples[start : start + rows_per_pass]) | {"num_items_in_batch": num_targets}
        kept = ("image_grid_thw",)  # on the CPU, where it is read without a host-device sync
        yield {name: tensor if name in kept else tensor.to(batch_maker.device) for name, tensor in batch.items()}
