"""The small model's packs beside stock rows, in every way.

Design: the reference is stock rows in float32. The spread is the distance of exact computations from it: rows alone and
not several together, with PyTorch's attention written out, and in the precision of training. Replayed passes run all
packs twice, in another order the second time, so that each is replayed after other packs have been in its buffers.
"""

from __future__ import annotations

import random

import torch

from lookonce.selftest.model import ModelSize, small_model
from lookonce.selftest.passes import Outcome, Passes
from lookonce.selftest.questions import Questions, make_batches, stock_rows
from lookonce.selftest.report import Check, failed, within_spread
from lookonce.selftest.ways import Way
from lookonce.train.data.packing import padded_length
from lookonce.train.model.compile import training_on_packs

RESULTS = ("loss", "gradient")
SEVERAL = 4
"""Rows of a forward pass of the reference."""
EPOCHS = 2
"""Epochs of packs that a captured pass is replayed for."""


class ModelChecks:
    """The comparisons in one precision; the reference is computed once."""

    def __init__(
        self, size: ModelSize, questions: Questions, dtype: torch.dtype, name: str, device: torch.device
    ) -> None:
        self.name, self.dtype = name, dtype
        self.batch_maker = make_batches(questions, size.hidden, device)
        self.micro_batches = [micro_batch for step in self.batch_maker.sampler.epoch(0) for micro_batch in step]
        self.model, self.device = small_model(size, dtype, device), device
        exact = small_model(size, torch.float32, device)
        self.expected = self._rows(Passes(exact, torch.float32, 0, device), SEVERAL)
        self.spread = self._spread()

    def checks(self, way: Way) -> list[Check]:
        """Compare one way; a computation that fails is a mismatch."""
        name = f"model, {self.name}, {way.name}"
        try:
            found = [outcome.distance(expected) for outcome, expected in self._compute(way)]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or a kernel raises
            return [failed(name, error, way)]
        differences, spreads = zip(*found, strict=True), zip(*self.spread, strict=True)
        return [
            within_spread(f"{name}: {result}", difference, spread, way)
            for result, difference, spread in zip(RESULTS, differences, spreads, strict=True)
        ]

    def _compute(self, way: Way) -> list[tuple[Outcome, Outcome]]:
        """Each pack's outcome, beside the expected one."""
        max_tokens = padded_length(self.batch_maker.sampler.batch.tokens_per_pack)
        passes = Passes(self.model, self.dtype, max_tokens, self.device, flex=way.flex)
        with training_on_packs(self.model, compiled=way.compiled):
            launched = [passes.outcome([self.batch_maker.batch(micro_batch)]) for micro_batch in self.micro_batches]
            if not way.recorded:  # otherwise they have compiled what is captured now: a capture cannot compile
                return list(zip(launched, self.expected, strict=True))
            captured = passes.captured(self.batch_maker.chat_tokenizer.merge_size)
            return [
                (passes.replayed(captured, self.batch_maker.batch(self.micro_batches[number])), self.expected[number])
                for number in _orders(len(self.micro_batches))
            ]

    def _spread(self) -> list[tuple[float, float]]:
        """Distances of exact computations of rows from the reference."""
        passes = Passes(self.model, self.dtype, 0, self.device)
        computed = [self._rows(passes, 1), self._rows(passes, 1, "eager"), self._rows(passes, SEVERAL)]
        return [
            outcome.distance(expected)
            for outcomes in computed
            for outcome, expected in zip(outcomes, self.expected, strict=True)
        ]

    def _rows(self, passes: Passes, rows_per_pass: int, attention: str = "sdpa") -> list[Outcome]:
        return [
            passes.stock(stock_rows(self.batch_maker, micro_batch, rows_per_pass), attention)
            for micro_batch in self.micro_batches
        ]


def _orders(number: int) -> list[int]:
    """The numbers below `number` in several random orders, one after another."""
    rng = random.Random(0)
    return [index for _ in range(EPOCHS) for index in rng.sample(range(number), number)]
