"""Log-probabilities of answers that are given, by passes over packs of training.

Design: an answer is a branch of its image's prefix, as in training, so it has the log-probability that it has in a
conversation of its own, apart from rounding. Only the tokens before targets go through the language model's head, and
their logits become float32 some rows at a time. Packs are made on a thread, ahead of their passes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lookonce.errors import TrainingError
from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.features import Batch, FeatureSource, image_inputs
from lookonce.train.data.groups import Group, group_examples, nested
from lookonce.train.data.packing import Pack, pack_step, padded_length
from lookonce.train.data.prefetch import Prefetcher
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.linear_attention import masks_of
from lookonce.train.model.loss import LOSS_KEYS, MASK_KEY

NUM_AHEAD = 2
"""Packs that are made before they are asked for."""
ROWS_AT_A_TIME = 256
"""Rows of logits that are in float32 together, 160 MB with a vocabulary of 152,000."""
OfPack = tuple[Sequence[Example], Pack]
"""Some examples, and a pack of them."""


class Likelihood:
    """Scores the targets of examples with a model, which may have an adapter."""

    def __init__(
        self,
        model: Any,
        chat: ChatTokenizer,
        source: FeatureSource,
        tokens_per_pack: int,
        dtype: torch.dtype,
        *,
        compiled: bool,
    ) -> None:
        """Passes run under autocast to `dtype`, unless that is float32; `compiled` compiles the decoder layers."""
        self._model, self._source, self._dtype, self._compiled = model.eval(), source, dtype, compiled
        self._device: torch.device = model.device
        self._image_token_id, self._tokens_per_pack = chat.image_token_id, tokens_per_pack
        self._collate = PackCollator.of(chat, source)
        self._mask = PackMask(padded_length(tokens_per_pack), self._device)

    def logprobs(self, batches: Iterable[Sequence[Example]]) -> Generator[list[tuple[Example, float]]]:
        """The examples of each batch, each with the sum of its targets' log-probabilities.

        Raises:
            TrainingError: the GPU is out of memory for one example.
        """
        planned: deque[tuple[Sequence[Example], list[Pack]]] = deque()

        def steps() -> Iterator[list[OfPack]]:
            for examples in batches:
                planned.append((examples, self._packs(examples)))
                yield [(examples, pack) for pack in planned[-1][1]]

        with contextlib.closing(Prefetcher(steps(), self._make, self._device, NUM_AHEAD)) as prefetcher:
            for made in iter(prefetcher.step, None):
                if (first := next(made, None)) is None:
                    return
                examples, packs = planned.popleft()
                found: dict[int, float] = {}
                with self._passes():
                    for pack, (batch, _) in zip(packs, chain([first], made), strict=True):
                        found |= self._of_pack((examples, pack), batch)
                yield [(example, found[number]) for number, example in enumerate(examples)]

    def _packs(self, examples: Sequence[Example]) -> list[Pack]:
        """The packs of some examples; they are longer if an example is."""
        longest = max(example.num_tokens for example in examples)
        [packs] = pack_step(self._groups(examples), max(self._tokens_per_pack, longest))
        return packs

    def _groups(self, examples: Sequence[Example]) -> list[Group]:
        """Candidates share their question, and questions their image."""
        return [nested(group, examples) for group in group_examples(examples, self._image_token_id)]

    def _make(self, of_pack: OfPack) -> Batch:
        examples, pack = of_pack
        length = padded_length(pack.num_tokens) if self._device.type == "cuda" else pack.num_tokens
        batch = self._collate(pack.groups, examples, [0.0] * pack.num_samples, length)
        shown = [key for group in pack.groups for key in examples[group.examples[0]].image_keys]
        on_device = {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}
        return on_device | image_inputs(self._source, shown, self._device)

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """The precision and the attention of passes."""
        autocast = torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)
        with torch.inference_mode(), autocast, training_on_packs(self._model, compiled=self._compiled):
            yield

    def _of_pack(self, of_pack: OfPack, batch: Batch) -> dict[int, float]:
        """The sum of each example of a pack, by its number; in two parts if the GPU is out of memory."""
        examples, pack = of_pack
        numbers = [number for group in pack.groups for number in group.examples]
        try:
            each = self._of_targets(batch)
        except torch.OutOfMemoryError:
            each = None
        if each is None:
            batch.clear()
            return self._in_parts([(number, examples[number]) for number in numbers])
        sums = [part.sum().item() for part in torch.split(each, [examples[number].num_targets for number in numbers])]
        return dict(zip(numbers, sums, strict=True))

    def _of_targets(self, batch: Batch) -> torch.Tensor:
        """The log-probability of each target of a pack, on the CPU."""
        inputs = {name: tensor for name, tensor in batch.items() if name not in (*LOSS_KEYS, MASK_KEY)}
        mask = masks_of(self._model, self._mask(batch[MASK_KEY]), batch[MASK_KEY])
        logits = self._model(**inputs, attention_mask=mask, use_cache=False).logits[0]
        rows = zip(*(torch.split(one, ROWS_AT_A_TIME) for one in (logits, batch["targets"][0])), strict=True)
        return torch.cat([-cross_entropy(some.float(), right, reduction="none") for some, right in rows]).double().cpu()

    def _in_parts(self, examples: Sequence[tuple[int, Example]]) -> dict[int, float]:
        """The sums of the numbered examples of a pack, in two passes."""
        if len(examples) == 1:
            example = examples[0][1]
            raise TrainingError(
                f"the GPU is out of memory for one candidate of {example.num_tokens:,} tokens ({example.origin}); "
                "use a larger GPU"
            )
        torch.cuda.empty_cache()
        found: dict[int, float] = {}
        half = len(examples) // 2
        for part in (examples[:half], examples[half:]):
            some = [example for _, example in part]
            pack = Pack(tuple(self._groups(some)))
            sums = self._of_pack((some, pack), self._make((some, pack)))
            found |= {part[place][0]: value for place, value in sums.items()}
        return found
