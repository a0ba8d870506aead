"""Forward passes to batches: the tensors of their texts and the features of their images, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from lookonce.train.attention import BLOCK
from lookonce.train.batch import Collator, image_keys
from lookonce.train.lengths import COMPILE_TOKENS, choose_lengths, fitting
from lookonce.train.order import Forward, Order
from lookonce.train.pack_batch import PackCollator
from lookonce.train.prompt import Example, Prompter
from lookonce.train.run_file import BatchSection
from lookonce.train.vision import Batch, VisionSource, images


@dataclass(frozen=True)
class Feed:
    """Some examples in their order, and what makes batches of them."""

    order: Order
    prompter: Prompter
    vision: VisionSource
    device: torch.device
    lengths: Sequence[int] = ()
    """That packs are padded to; none if they need not be."""

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        prompter: Prompter,
        vision: VisionSource,
        batch: BatchSection,
        device: torch.device,
        seed: int,
        num_epochs: float = 1,
        **kind: int,
    ) -> Feed:
        """Feed `examples` in training of `num_epochs`; on a GPU packs are padded to a few lengths, so that little is
        compiled."""
        order = Order.of(examples, prompter.image_token_id, batch, seed, **kind)
        feed = cls(order, prompter, vision, device)
        if not batch.has_packs or device.type != "cuda":
            return feed
        epochs = order.lengths_to_come()
        worth = COMPILE_TOKENS * order.num_ranks * len(epochs) / num_epochs
        return replace(feed, lengths=choose_lengths(list(chain(*epochs)), batch.tokens_per_pack, BLOCK, worth))

    def batch(self, forward: Forward) -> Batch:
        """What the model gets, `run` and `prefix` in place of the mask, and the targets and weights of the loss."""
        examples, groups = self.order.examples, forward.pack.groups
        if not self.order.batch.has_packs:
            rows = [examples[number] for group in groups for number in group.examples]
            batch, shown = self._rows.texts(rows, forward.weights), rows
        else:
            num_tokens = forward.pack.num_tokens
            length = fitting(num_tokens, self.lengths) if self.lengths else num_tokens
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
