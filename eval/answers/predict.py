"""Answer a question about any images, or about none, with a trained adapter.

Needs the model, the adapter and the images; neither the cache nor the records of the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from lookonce.cache.build.encode import encode_image
from lookonce.cache.constants import Grid
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.dtypes import STORAGE
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.datasets.records import Record, Turn
from lookonce.environment import best_device
from lookonce.eval.answers.generate import greedy_answers
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.identity import model_identity
from lookonce.train.data.collate_rows import RowCollator
from lookonce.train.data.features import CPU
from lookonce.train.data.tokenize import ChatTokenizer
from lookonce.train.model.load import load_trained


@dataclass(frozen=True)
class Encoded:
    """A `FeatureSource` of images that were just encoded, by path."""

    images: Mapping[str, tuple[torch.Tensor, Grid]]
    has_tower: ClassVar[bool] = False

    def grid_thw(self, key: str) -> Grid:
        return self.images[key][1]

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        return torch.cat([self.images[key][0] for key in keys]).to(device)


def predict(folder: RunFolder, images: Sequence[Path], question: str, system: str | None = None) -> str:
    """The trained model's greedy answer to a question about images in that order, or about none.

    Raises:
        LookonceError: an image cannot be read, there is no adapter, or it was trained on another model.
    """
    run = folder.read_run()
    model_folder = ModelFolder.open(run.model.path, run.model.revision)
    folder.check_inputs(model_identity(model_folder.folder, folder.recorded_inputs()))
    source = _encode(folder, model_folder, run, images)
    chat_tokenizer = ChatTokenizer(model_folder.folder, model_folder.config)
    record, keys = Record(tuple(images), (Turn(question, ""),), system, origin="the question"), [*map(str, images)]
    example = chat_tokenizer.question(record, 0, keys, [source.grid_thw(key) for key in keys])
    model = load_trained(model_folder, run, folder.adapter)
    collator = RowCollator(source, chat_tokenizer.image_token_id, chat_tokenizer.tokenizer.pad_token_id)
    return greedy_answers(
        model, chat_tokenizer.tokenizer, collator, [example], run.eval.max_new_tokens, run.train.precision
    )[0].text


def _encode(folder: RunFolder, model_folder: ModelFolder, run: RunFile, images: Sequence[Path]) -> Encoded:
    """Encode images as for the run's cache; the tower is only read if there are images."""
    if not images:
        return Encoded({})
    processor = ImageProcessor(model_folder.folder, run.cache.backend, run.cache.min_pixels, run.cache.max_pixels)
    folder.check_inputs({"cache": Fingerprint.of(model_folder, processor, run.cache.dtype).sha256})
    storage = STORAGE[run.cache.dtype]
    tower = Tower(model_folder, storage.compute, best_device())
    return Encoded({str(image): encode_image(image, processor, tower, storage) for image in dict.fromkeys(images)})
