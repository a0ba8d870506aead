"""Batches of micro-batches, made by the public pieces, and passes over them that are captured and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lookonce.run.sections import BatchSection
from lookonce.selftest.model import Outcome, Passes, Questions, make_sampler
from lookonce.train.data.batches import CPU, Batch
from lookonce.train.data.dataset import DataCollatorForPacks, PackBatchSampler, VQADataset
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.data.tokenize import Example
from lookonce.train.model.packs import CapturedPasses, copy_into, cuda_graph_capture, shape_of_batch, share_of_loss


class BatchMaker:
    """A sampler, and what turns its micro-batches into batches of tensors."""

    def __init__(self, sampler: Sampler, chat: Any, source: Any, device: torch.device, *, pads: bool) -> None:
        self.dataset = VQADataset.of(sampler.examples, chat, source)
        self.packs = PackBatchSampler.of(self.dataset, sampler.batch, sampler.seed, sampler.rank, sampler.num_ranks)
        self.sampler, self.chat_tokenizer = sampler, chat
        self.collator = DataCollatorForPacks(self.dataset, device=device, pads_to_blocks=pads)

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        chat: Any,
        source: Any,
        batch: BatchSection,
        device: torch.device,
        seed: int,
        *,
        pads: bool | None = None,
    ) -> BatchMaker:
        pads = batch.has_packs and device.type == "cuda" if pads is None else pads
        return cls(Sampler.of(examples, chat.image_token_id, batch, seed), chat, source, device, pads=pads)

    def pack(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """One batch, as `pack_loss` takes it."""
        [indices] = self.packs.step_of([micro_batch])
        return self.collator(self.dataset.__getitems__(indices))

    def batch(self, micro_batch: MicroBatch) -> Batch:
        """Its tensors."""
        return tensors_of(self.pack(micro_batch))


def packs_of(questions: Questions, hidden: int, device: torch.device = CPU) -> list[dict[str, Any]]:
    """The packs of an epoch of random questions, in whole blocks."""
    sampler = make_sampler(questions, hidden)
    collator = DataCollatorForPacks(sampler.dataset, device=device, pads_to_blocks=True)
    return [collator(sampler.dataset.__getitems__(indices)) for indices in sampler]


def tensors_of(pack: Mapping[str, Any]) -> Batch:
    """The tensors of a batch."""
    return {name: value for name, value in pack.items() if isinstance(value, torch.Tensor)}


class Replays:
    """The passes of a model over packs, captured on a GPU. Within `packed_attention`."""

    def __init__(self, passes: Passes, merge_size: int, tokens_per_pack: int) -> None:
        self._passes, self._tokens_per_pack = passes, {"tokens_per_pack": tokens_per_pack}
        trained = [weight for weight in passes.model.parameters() if weight.requires_grad]
        self._captured = CapturedPasses(self._loss, trained, merge_size, cuda_graph_capture)

    def _loss(self, batch: Batch) -> torch.Tensor:
        with self._passes.autocast():
            return share_of_loss(self._passes.model, batch | self._tokens_per_pack)

    def launched(self, pack: Mapping[str, Any]) -> Outcome:
        """The outcome of a pack on the inputs of its captured pass: products of other shapes are rounded differently.

        It is launched before too, as a capture cannot compile.
        """
        self._passes.outcome([pack])
        batch = tensors_of(pack)
        _, inputs, _ = self._captured.prepare(shape_of_batch(batch), batch)
        copy_into(inputs, batch)
        self._passes.model.zero_grad(set_to_none=True)
        return self._passes.outcome([inputs | self._tokens_per_pack])

    def replayed(self, pack: Mapping[str, Any]) -> Outcome:
        loss: Any = self._captured(tensors_of(pack))
        loss.backward()
        return Outcome.of(self._passes.model, loss.detach())


def flat(outcome: Outcome) -> torch.Tensor:
    """All gradients of some passes."""
    return torch.cat([gradient.flatten() for gradient in outcome.gradients.values()])
