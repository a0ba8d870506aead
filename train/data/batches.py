"""Turn micro-batches into batches on the device: the tensors of their texts and the features of their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lookonce.run.sections.batch import BatchSection
from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.collate_rows import RowCollator, image_keys
from lookonce.train.data.features import Batch, FeatureSource, image_inputs
from lookonce.train.data.packing import padded_length
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.data.tokenize import ChatTokenizer, Example


@dataclass(frozen=True)
class BatchMaker:
    """A sampler, and what turns its micro-batches into batches."""

    sampler: Sampler
    chat_tokenizer: ChatTokenizer
    source: FeatureSource
    device: torch.device
    pads_to_blocks: bool = False
    """Whether packs are padded to whole blocks of FlexAttention."""

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        chat_tokenizer: ChatTokenizer,
        source: FeatureSource,
        batch: BatchSection,
        device: torch.device,
        seed: int,
        **ranks: int,
    ) -> BatchMaker:
        """Batches of `examples` on a device; `ranks` are `rank` and `num_ranks`."""
        sampler = Sampler.of(examples, chat_tokenizer.image_token_id, batch, seed, **ranks)
        pads_to_blocks = batch.has_packs and device.type == "cuda"
        return cls(sampler, chat_tokenizer, source, device, pads_to_blocks)

    def batch(self, micro_batch: MicroBatch) -> Batch:
        """The model's inputs, the targets and their weights. A pack has `segment` and `prefix` instead of a mask."""
        collate = self._pack if self.sampler.batch.has_packs else self._rows
        batch, shown = collate(micro_batch)
        text = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        return text | image_inputs(self.source, image_keys(shown), self.device)

    def _rows(self, micro_batch: MicroBatch) -> tuple[Batch, list[Example]]:
        """The texts as padded rows, and the examples whose images are shown."""
        rows = [self.sampler.examples[index] for group in micro_batch.pack.groups for index in group.examples]
        return self._row_collator.text_batch(rows, micro_batch.target_weights), rows

    def _pack(self, micro_batch: MicroBatch) -> tuple[Batch, list[Example]]:
        """The texts as a pack, and one example of each group, whose images are shown."""
        pack, examples = micro_batch.pack, self.sampler.examples
        length = padded_length(pack.num_tokens) if self.pads_to_blocks else pack.num_tokens
        batch = self._pack_collator(pack.groups, examples, micro_batch.target_weights, length)
        return batch, [examples[group.examples[0]] for group in pack.groups]

    @cached_property
    def _row_collator(self) -> RowCollator:
        chat = self.chat_tokenizer
        return RowCollator(self.source, chat.image_token_id, chat.tokenizer.pad_token_id)

    @cached_property
    def _pack_collator(self) -> PackCollator:
        return PackCollator.of(self.chat_tokenizer, self.source)
