"""Ways to train side by side: the same model, records and adapter, step by step through each one's whole pipeline.

Design: times are of whole optimizer steps, waiting for data included, on an idle machine, without the first ones, which
warm up and compile. Tokens are counted as each sample has them when it stands alone, so that ways which run fewer do
not look slower for it. Beside each stands what its matrix products alone would take at the rate that this card reaches
in large products: a frozen weight is multiplied with in the forward and in the backward pass, 4 operations a token.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.text import duration, faster, table
from lookonce.train.fast_layers import text_model, training_on_packs
from lookonce.train.prompt import Example
from lookonce.train.session import Session
from lookonce.train.trainer import RunTrainer
from lookonce.train.ways import Say, Way, set_up

KVASIR_EPOCH = 41_079
"""Training samples of Kvasir-VQA, split by image 70/15/15."""
NUM_WARMUP_STEPS = 2
MIN_SECONDS = 8
"""Fast ways make more steps than are asked for, until they have been timed so long."""
MAX_STEPS = 100_000
"""Nobody gets there."""


@dataclass(frozen=True)
class Measured:
    """Some steps of one way."""

    way: str
    says: str
    num_steps: int
    num_samples: int
    seconds: float
    wait_share: float
    """Of the time, spent waiting for data."""
    tokens_per_second: float
    """Of samples as they would stand alone, without padding."""
    products_share: float | None
    """Of the time, what the language model's products would take at the card's own rate; None without a GPU."""
    peak_gb: float | None
    losses: list[float] = field(default_factory=list)
    """Of the first steps, those that warm up included; as many for every way."""

    @property
    def ms_per_sample(self) -> float:
        return 1e3 * self.seconds / self.num_samples

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ms_per_sample": self.ms_per_sample}


@dataclass(frozen=True)
class StepReport:
    """All ways that were measured."""

    measured: list[Measured]
    samples_per_step: int
    tflops: float | None
    """That the card reaches in large products."""

    def speedup(self, way: str) -> float:
        """Against the first."""
        return self.measured[0].ms_per_sample / self.of(way).ms_per_sample

    def of(self, way: str) -> Measured:
        return next(measured for measured in self.measured if measured.way == way)

    def text(self) -> str:
        lines = [
            (
                one.way,
                f"{1e3 / one.ms_per_sample:.1f}",
                f"{one.ms_per_sample:.2f}",
                f"{self.measured[0].ms_per_sample / one.ms_per_sample:.1f}x",
                f"{one.tokens_per_second:,.0f}",
                _share(one.products_share),
                _share(one.wait_share),
                "-" if one.peak_gb is None else f"{one.peak_gb:.1f}",
                duration(one.ms_per_sample * KVASIR_EPOCH / 1e3),
                f"{one.losses[-1]:.4f}",
            )
            for one in self.measured
        ]
        head = ("", "samples/s", "ms/sample", "", "tokens/s", "products", "wait", "peak GB", "epoch", "last loss")
        notes = [f"  {one.way}: {one.says} ({one.num_steps} steps)" for one in self.measured]
        rate = [f"  products: their share of the time at {self.tflops:.0f} TFLOP/s"] if self.tflops else []
        epoch = f"  epoch: {KVASIR_EPOCH:,} samples, Kvasir-VQA's training split"
        return "\n".join([table(head, lines), *notes, *rate, epoch, f"  {self.samples_per_step} samples a step"])

    def verdict(self) -> str:
        """The last way beside the first, in words."""
        return faster(self.measured[0].ms_per_sample / self.measured[-1].ms_per_sample)

    def to_json(self) -> dict[str, Any]:
        return {
            "ways": [one.to_json() for one in self.measured],
            "samples_per_step": self.samples_per_step,
            "tflops": self.tflops,
        }


def bench_step(
    session: Session, examples: Sequence[Example], ways: Sequence[Way], num_steps: int, say: Say = lambda text: None
) -> StepReport:
    """Train `num_steps` optimizer steps each way, or more, and measure them; nothing is saved. `say` gets notes."""
    rate = products_rate() if torch.cuda.is_available() else None
    measured = [_measure(way, session, examples, num_steps, rate, say) for way in ways]
    return StepReport(measured, session.inputs.run.batch.samples_per_step, rate and rate / 1e12)


def _measure(
    way: Way, session: Session, examples: Sequence[Example], num_steps: int, rate: float | None, say: Say
) -> Measured:
    _free_memory()
    with tempfile.TemporaryDirectory() as folder:
        say(f"{way.name}: {way.says}")
        model, trainer = set_up(way, session, examples, MAX_STEPS, Path(folder), say)
        clock = _Clock(trainer, num_steps)
        compiled = session.inputs.run.train.compile and torch.cuda.is_available()
        with training_on_packs(model, compiled=compiled) if way.has_packs else contextlib.nullcontext():
            trainer.train()
    seconds, waited, measured_steps = clock.measured()
    in_step = session.inputs.run.batch.samples_per_step
    num_samples = samples_seen(len(examples), in_step, measured_steps + NUM_WARMUP_STEPS)
    num_samples -= samples_seen(len(examples), in_step, NUM_WARMUP_STEPS)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    num_tokens = sum(example.num_tokens for example in examples)
    num_run = sum(trainer.feed.order.lengths(0)) if way.has_packs else num_tokens
    ran = num_run / len(examples) * num_samples
    measured = Measured(
        way=way.name,
        says=way.says,
        num_steps=measured_steps,
        num_samples=num_samples,
        seconds=seconds,
        wait_share=waited / seconds,
        tokens_per_second=num_tokens / len(examples) * num_samples / seconds,
        products_share=rate and 4 * weights_multiplied(model) * ran / rate / seconds,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        losses=losses[: num_steps + NUM_WARMUP_STEPS],
    )
    say(f"{way.name}: {measured.ms_per_sample:.2f} ms a sample")
    return measured


def samples_seen(num_samples: int, samples_per_step: int, num_steps: int) -> int:
    """In so many steps; the last step of an epoch may be smaller."""
    epochs, steps = divmod(num_steps, math.ceil(num_samples / samples_per_step))
    return epochs * num_samples + min(steps * samples_per_step, num_samples)


def weights_multiplied(model: Any) -> int:
    """The weights of the decoder layers that every token is multiplied with, the adapter's included."""
    return sum(weight.numel() for weight in text_model(model).layers.parameters() if weight.ndim == 2)


def products_rate() -> float:
    """Operations a second that this GPU reaches in large bfloat16 products."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(30):
        torch.cuda.synchronize()
        start = time.perf_counter()
        left @ right
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * 8192**3 / statistics.median(seconds)


class _Clock(TrainerCallback):
    """When each optimizer step of a trainer ended, and how long it had waited for data by then."""

    def __init__(self, trainer: Any, num_steps: int) -> None:
        """Stops the trainer after at least `num_steps` and `MIN_SECONDS`."""
        self._num_steps = num_steps
        self._ends: list[float] = []
        self._waits: list[float] = []
        self._trainer, self._waited = trainer, 0.0
        if not isinstance(trainer, RunTrainer):
            self._get, trainer.get_batch_samples = trainer.get_batch_samples, self._timed
        trainer.add_callback(self)

    def _timed(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        found = self._get(*arguments)
        self._waited += time.perf_counter() - start
        return found

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._ends.append(time.perf_counter())
        self._waits.append(getattr(self._trainer, "wait_seconds", self._waited))
        num_measured = len(self._ends) - NUM_WARMUP_STEPS
        if num_measured >= self._num_steps and self.measured()[0] >= MIN_SECONDS:
            control.should_training_stop = True

    def measured(self) -> tuple[float, float, int]:
        """Seconds of the steps after the first ones, how many of these it waited, and the number of these steps."""
        ends, waits = self._ends[NUM_WARMUP_STEPS - 1 :], self._waits[NUM_WARMUP_STEPS - 1 :]
        return ends[-1] - ends[0], waits[-1] - waits[0], len(ends) - 1


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _free_memory() -> None:
    """Of the way measured before, whose trainer and callbacks hold each other; else it would count as peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
