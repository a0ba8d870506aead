"""Cached and plain side by side: the same steps once from features and once from pixels through the tower.

Design: the same Trainer, the same examples in the same order, the same adapter to begin with; only where images come
from differs. So the losses must agree, and what differs in time is what the cache is worth. Times are medians of whole
optimizer steps, waiting for data included, on an idle machine; the first steps, which warm up, do not count.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.text import faster, table
from lookonce.train.batch import Collator
from lookonce.train.inputs import Inputs
from lookonce.train.model import PRECISIONS, add_lora, load_with_tower, load_without_tower
from lookonce.train.progress import STOCK_PRINTERS
from lookonce.train.prompt import Example, Prompter
from lookonce.train.trainer import RunTrainer, training_arguments
from lookonce.train.vision import CachedFeatures, Pixels, VisionSource

NUM_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """Some training steps of one kind."""

    losses: list[float]
    ms_per_sample: float
    wait_share: float
    peak_gb: float | None
    """Of GPU memory; None without a GPU."""


@dataclass(frozen=True)
class Comparison:
    """The same steps with and without the cache."""

    num_steps: int
    samples_per_step: int
    cached: Measured
    plain: Measured

    @property
    def speedup(self) -> float:
        return self.plain.ms_per_sample / self.cached.ms_per_sample

    @property
    def worst_loss_difference(self) -> float:
        """The largest relative difference of the losses of a step."""
        pairs = zip(self.cached.losses, self.plain.losses, strict=True)
        return max(abs(cached - plain) / abs(plain) for cached, plain in pairs)

    def text(self) -> str:
        lines = [
            (
                name,
                f"{kind.ms_per_sample:.2f}",
                f"{kind.wait_share:.1%}",
                _gigabytes(kind.peak_gb),
                f"{kind.losses[-1]:.4f}",
            )
            for name, kind in (("plain", self.plain), ("cached", self.cached))
        ]
        return (
            table(("", "ms/sample", "data wait", "peak GB", "last loss"), lines)
            + f"\n{faster(self.speedup)}; losses differ by at most {self.worst_loss_difference:.1e} (relative)"
            + f"\nmedians of {self.num_steps} steps of {self.samples_per_step} samples, each way"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"speedup": self.speedup, "worst_loss_difference": self.worst_loss_difference}


def compare(inputs: Inputs, prompter: Prompter, examples: Sequence[Example], num_steps: int) -> Comparison:
    """Train `num_steps` optimizer steps each way and measure them; nothing is saved."""
    cached = CachedFeatures(inputs.open_cache())
    plain = Pixels(inputs.processor, inputs.images.path_of)
    return Comparison(
        num_steps=num_steps,
        samples_per_step=inputs.run.batch.samples_per_step,
        plain=_measure(inputs, prompter, examples, num_steps, plain, load_with_tower),
        cached=_measure(inputs, prompter, examples, num_steps, cached, load_without_tower),
    )


def _measure(
    inputs: Inputs, prompter: Prompter, examples: Sequence[Example], num_steps: int, vision: VisionSource, load: Any
) -> Measured:
    _free_memory()
    run = inputs.run
    model = load(inputs.checkpoint, PRECISIONS[run.train.precision], run.model.attention)
    model = add_lora(model, inputs.checkpoint, run.lora, run.train.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(
            run,
            Path(folder),
            max_steps=num_steps + NUM_WARMUP_STEPS,
            logging_steps=1,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
            report_to="none",
        )
        collator = Collator(vision, prompter.image_token_id, prompter.tokenizer.pad_token_id)
        trainer = RunTrainer(model, arguments, collator, examples)
        for printer in STOCK_PRINTERS:
            trainer.remove_callback(printer)
        clock = _StepClock(trainer)
        trainer.add_callback(clock)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return clock.measured(run.batch.samples_per_step, losses)


class _StepClock(TrainerCallback):
    """When each optimizer step ended, and how long had been waited for data by then."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer
        self.ends: list[float] = []
        self.waits: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.waits.append(self.trainer.wait_seconds)

    def measured(self, samples_per_step: int, losses: list[float]) -> Measured:
        ends, waits = self.ends[NUM_WARMUP_STEPS - 1 :], self.waits[NUM_WARMUP_STEPS - 1 :]
        steps = [end - start for start, end in itertools.pairwise(ends)]
        peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
        return Measured(
            losses=losses,
            ms_per_sample=1e3 * statistics.median(steps) / samples_per_step,
            wait_share=(waits[-1] - waits[0]) / (ends[-1] - ends[0]),
            peak_gb=peak,
        )


def _gigabytes(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:.1f}"


def _free_memory() -> None:
    """Of the way measured before, whose trainer and callbacks hold each other; else it would count as peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
