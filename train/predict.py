"""Answer a question about any image with a trained adapter.

Needs the model, the adapter and the image; neither the cache nor the records of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from lookonce.cache.make.encode import encode_image
from lookonce.cache.model.checkpoint import Checkpoint
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.receipts import Grid
from lookonce.cache.store.storage import STORAGE
from lookonce.datasets.records import Record, Turn
from lookonce.train.batch import Collator
from lookonce.train.evaluate import greedy_answers
from lookonce.train.model import best_device, load_trained
from lookonce.train.prompt import Prompter
from lookonce.train.run_folder import RunFolder
from lookonce.train.vision import CPU


@dataclass(frozen=True)
class OneImage:
    """A `VisionSource` of one image, encoded just now."""

    features: torch.Tensor
    grid: Grid
    has_tower: ClassVar[bool] = False

    def grid_thw(self, key: str) -> Grid:
        return self.grid

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        return torch.cat([self.features for _ in keys]).to(device)


def predict(folder: RunFolder, image: Path, question: str, system: str | None = None) -> str:
    """The trained model's greedy answer.

    Raises:
        LookonceError: the image can not be read, there is no adapter, or it was trained on another model.
    """
    run = folder.read_run()
    checkpoint = Checkpoint.open(run.model.path, run.model.revision)
    folder.check_inputs({"model": checkpoint.content_hash()})
    processor = ImageProcessor(checkpoint.folder, run.cache.backend, run.cache.min_pixels, run.cache.max_pixels)
    storage = STORAGE[run.cache.dtype]
    features, grid = encode_image(image, processor, Tower(checkpoint, storage.compute, best_device()), storage)
    source = OneImage(features, grid)
    prompter = Prompter(checkpoint.folder, checkpoint.config)
    record = Record((image,), (Turn(question, ""),), system, origin="the question")
    example = prompter.question(record, 0, ["image"], [grid])
    model = load_trained(checkpoint, run, folder.adapter)
    collator = Collator(source, prompter.image_token_id, prompter.tokenizer.pad_token_id)
    return greedy_answers(
        model, prompter.tokenizer, collator, [example], run.eval.max_new_tokens, 1, run.train.precision
    )[0]
