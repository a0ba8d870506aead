"""Examples to tensors with a row for each: for training one by one, for comparisons and for generation.

Design: images lie one after the other without padding; text is padded on the right for training and on the left for
generation. Only positions whose next token is supervised go through the language model's head: `logits_to_keep` names
the columns in which any row has one, and `targets` and `weights` are given for those columns alone. With a vocabulary
of 151,936 that is most of the memory of a short-answer batch. What each target weighs in the loss of its optimizer step
is written into the batch, so that a step may be cut into forward passes, and spread over processes, in any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from lookonce.train.data.features import Batch, VisionSource, images
from lookonce.train.data.tokenize import Example

IGNORED = -100


@dataclass(frozen=True)
class Collator:
    """Makes batches of rows."""

    vision: VisionSource
    image_token_id: int
    pad_token_id: int

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """A training batch, with its images; the loss is the mean over its supervised tokens."""
        num_targets = sum(int(example.supervised.sum()) for example in examples)
        return self.texts(examples, [1 / max(num_targets, 1)] * len(examples)) | self._images(examples)

    def texts(self, examples: Sequence[Example], weights: Sequence[float]) -> Batch:
        """A training batch without its images: `B` examples and `T` tokens, `K` of them predicted in at least one row.

        `input_ids`, `attention_mask`, `mm_token_type_ids` are `[B, T]`; `logits_to_keep` `[K]` are the columns to
        predict from; `targets` `[B, K]` are the tokens to predict there and `weights` `[B, K]` what each counts in the
        loss: what `weights` says of its example.
        """
        rows = [example.expanded(self.image_token_id) for example in examples]
        input_ids = self._pad([ids for ids, _ in rows], self.pad_token_id)
        supervised = self._pad([flags for _, flags in rows], 0).bool()
        targets = torch.where(supervised, input_ids, IGNORED)[:, 1:]
        columns = (targets != IGNORED).any(dim=0).nonzero().flatten()
        batch = self._text(input_ids, self._pad([np.ones_like(ids) for ids, _ in rows], 0))
        batch["logits_to_keep"], batch["targets"] = columns, targets[:, columns]
        of_row = torch.tensor(weights, dtype=torch.float32)[:, None]
        return batch | {"weights": (batch["targets"] != IGNORED) * of_row}

    def prompts(self, examples: Sequence[Example]) -> Batch:
        """A batch to generate from: prompts `[B, T]`, padded on the left."""
        rows = [example.expanded(self.image_token_id)[0] for example in examples]
        input_ids = self._pad(rows, self.pad_token_id, left=True)
        attention_mask = self._pad([np.ones_like(ids) for ids in rows], 0, left=True)
        return self._text(input_ids, attention_mask) | self._images(examples)

    def _images(self, examples: Sequence[Example]) -> Batch:
        return images(self.vision, image_keys(examples))

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
    """The images of a batch of rows, in the order in which the model wants them."""
    return [key for example in examples for key in example.image_keys]
