"""Collator of padded rows, one per example: for `separate` mode, for comparisons and for generation.

Design: images follow one another without padding. Text is padded on the right for training and on the left for
generation. Only positions whose next token is a target go through the language model's head: `logits_to_keep` lists the
columns where at least one row has a target, and `targets` and `weights` have those columns only. With a vocabulary of
151,936 this saves most of the memory of a batch with short answers. The batch holds the target weights (sampler.py).

Shapes: `B` rows, `T` tokens per row with padding, `K` columns to predict from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from lookonce.train.data.features import Batch, FeatureSource, image_inputs
from lookonce.train.data.tokenize import Example

IGNORED = -100
"""Target of a position that predicts nothing."""


@dataclass(frozen=True)
class RowCollator:
    """Makes batches of padded rows."""

    source: FeatureSource
    image_token_id: int
    pad_token_id: int

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """A training batch with images, whose loss is the mean over its targets."""
        num_targets = sum(example.num_targets for example in examples)
        return self.text_batch(examples, [1 / max(num_targets, 1)] * len(examples)) | self._images(examples)

    def text_batch(self, examples: Sequence[Example], target_weights: Sequence[float]) -> Batch:
        """A training batch without images. `target_weights` has one weight per example, for each of its targets.

        `input_ids`, `attention_mask`, `mm_token_type_ids` `[B, T]`; `logits_to_keep` `[K]`: columns to predict from;
        `targets`, `weights` `[B, K]`: the tokens to predict there (`IGNORED` where there is none) and their weights.
        """
        rows = [example.expanded(self.image_token_id) for example in examples]
        input_ids = self._pad([ids for ids, _ in rows], self.pad_token_id)
        supervised = self._pad([flags for _, flags in rows], 0).bool()
        targets = torch.where(supervised, input_ids, IGNORED)[:, 1:]
        columns = (targets != IGNORED).any(dim=0).nonzero().flatten()
        batch = self._text(input_ids, self._pad([np.ones_like(ids) for ids, _ in rows], 0))
        batch["logits_to_keep"], batch["targets"] = columns, targets[:, columns]
        row_weights = torch.tensor(target_weights, dtype=torch.float32)[:, None]
        return batch | {"weights": (batch["targets"] != IGNORED) * row_weights}

    def prompts(self, examples: Sequence[Example]) -> Batch:
        """A batch to generate from, with images: prompts `[B, T]`, padded on the left."""
        rows = [example.expanded(self.image_token_id)[0] for example in examples]
        input_ids = self._pad(rows, self.pad_token_id, left=True)
        attention_mask = self._pad([np.ones_like(ids) for ids in rows], 0, left=True)
        return self._text(input_ids, attention_mask) | self._images(examples)

    def _images(self, examples: Sequence[Example]) -> Batch:
        return image_inputs(self.source, image_keys(examples))

    def _text(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Batch:
        is_image = (input_ids == self.image_token_id).int()
        return {"input_ids": input_ids, "attention_mask": attention_mask, "mm_token_type_ids": is_image}

    @staticmethod
    def _pad(rows: Sequence[np.ndarray], value: int, left: bool = False) -> torch.Tensor:
        length = max(len(row) for row in rows)
        sides = [(length - len(row), 0) if left else (0, length - len(row)) for row in rows]
        tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        return torch.stack([pad(tensor, side, value=value) for tensor, side in zip(tensors, sides, strict=True)])


def image_keys(examples: Sequence[Example]) -> list[str]:
    """The keys of the images of some examples, in the order in which the model expects them."""
    return [key for example in examples for key in example.image_keys]
