"""Examples to tensors, for training and for generation.

Design: images lie one after the other without padding; text is padded on the right for training and on the left for
generation. Only positions whose next token is supervised go through the language model's head: `logits_to_keep` names
the columns in which any row has one, and `labels` are given for those columns alone. With a vocabulary of 151,936
that is most of the memory of a short-answer batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from lookonce.train.prompt import Example
from lookonce.train.vision import VisionSource

IGNORED = -100
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Collator:
    """Makes batches; picklable, so that loader workers can hold it."""

    vision: VisionSource
    image_token_id: int
    pad_token_id: int

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """A training batch of `B` examples and `T` tokens, `K` of them predicted in at least one row.

        `input_ids`, `attention_mask`, `mm_token_type_ids` are `[B, T]`; `logits_to_keep` `[K]` are the columns to
        predict from; `labels` `[B, 1 + K]` are the tokens to predict there, after a first column that is always
        ignored: Trainer counts `labels[:, 1:]`, as for labels that are shifted inside the model.
        """
        rows = [example.expanded(self.image_token_id) for example in examples]
        input_ids = self._pad([ids for ids, _ in rows], self.pad_token_id)
        supervised = self._pad([flags for _, flags in rows], 0).bool()
        targets = torch.where(supervised, input_ids, IGNORED)[:, 1:]
        columns = (targets != IGNORED).any(dim=0).nonzero().flatten()
        batch = self._text(input_ids, self._pad([np.ones_like(ids) for ids, _ in rows], 0))
        batch["logits_to_keep"] = columns
        batch["labels"] = pad(targets[:, columns], (1, 0), value=IGNORED)
        return batch | self._images(examples)

    def prompts(self, examples: Sequence[Example]) -> Batch:
        """A batch to generate from: prompts `[B, T]`, padded on the left."""
        rows = [example.expanded(self.image_token_id)[0] for example in examples]
        input_ids = self._pad(rows, self.pad_token_id, left=True)
        attention_mask = self._pad([np.ones_like(ids) for ids in rows], 0, left=True)
        return self._text(input_ids, attention_mask) | self._images(examples)

    def _text(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Batch:
        is_image = (input_ids == self.image_token_id).int()
        return {"input_ids": input_ids, "attention_mask": attention_mask, "mm_token_type_ids": is_image}

    def _images(self, examples: Sequence[Example]) -> Batch:
        keys = [key for example in examples for key in example.image_keys]
        if not keys:
            return {}
        grids = torch.tensor([self.vision.grid_thw(key) for key in keys])
        return {"pixel_values": self.vision.load(keys), "image_grid_thw": grids}

    @staticmethod
    def _pad(rows: Sequence[np.ndarray], value: int, left: bool = False) -> torch.Tensor:
        length = max(len(row) for row in rows)
        sides = [(length - len(row), 0) if left else (0, length - len(row)) for row in rows]
        tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        return torch.stack([pad(tensor, side, value=value) for tensor, side in zip(tensors, sides, strict=True)])
