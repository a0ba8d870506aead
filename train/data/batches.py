"""Forward passes to batches: the tensors of their texts and the features of their images, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lookonce.run.config import BatchSection
from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.collate_rows import Collator, image_keys
from lookonce.train.data.features import Batch, VisionSource, images
from lookonce.train.data.packing import padded_length
from lookonce.train.data.sampler import Forward, Order
from lookonce.train.data.tokenize import Example, Prompter


@dataclass(frozen=True)
class Feed:
    """Some examples in their order, and what makes batches of them."""

    order: Order
    prompter: Prompter
    vision: VisionSource
    device: torch.device
    in_blocks: bool = False
    """Packs are padded to whole blocks of FlexAttention."""

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        prompter: Prompter,
        vision: VisionSource,
        batch: BatchSection,
        device: torch.device,
        seed: int,
        **kind: int,
    ) -> Feed:
        """Feed `examples` in the order of a seed to a model on a device."""
        order = Order.of(examples, prompter.image_token_id, batch, seed, **kind)
        return cls(order, prompter, vision, device, in_blocks=batch.has_packs and device.type == "cuda")

    def batch(self, forward: Forward) -> Batch:
        """What the model gets, `run` and `prefix` in place of the mask, and the targets and weights of the loss."""
        examples, groups = self.order.examples, forward.pack.groups
        if not self.order.batch.has_packs:
            rows = [examples[number] for group in groups for number in group.examples]
            batch, shown = self._rows.texts(rows, forward.weights), rows
        else:
            num_tokens = forward.pack.num_tokens
            length = padded_length(num_tokens) if self.in_blocks else num_tokens
            batch = self._packs(groups, examples, forward.weights, length)
            shown = [examples[group.examples[0]] for group in groups]
        text = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        return text | images(self.vision, image_keys(shown), self.device)

    @property
    def _rows(self) -> Collator:
        return Collator(self.vision, self.prompter.image_token_id, self.prompter.tokenizer.pad_token_id)

    @property
    def _packs(self) -> PackCollator:
        prompter = self.prompter
        return PackCollator(
            prompter.image_token_id, prompter.tokenizer.pad_token_id, prompter.merge_size, self.vision.grid_thw
        )
