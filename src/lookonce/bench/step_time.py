"""Measure training variants side by side: the same model, records and adapter, through each variant's whole pipeline.

Design: whole epochs are timed, so that every variant runs the same samples. Waiting for data is included; the first
steps, which warm up, are not. The measurement adds no host-device sync between its first and last step. Each sample's
tokens are counted as if it stood alone, so that a variant that processes fewer tokens does not look slower. MFU
compares the FLOPs of the matrix products with those that this GPU reaches in large products.

Under torchrun the processes share each step as they do in training, and times are of all of them together.
"""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce import environment
from lookonce.bench.flops import num_flops
from lookonce.bench.matmul import matmul_flops_per_second
from lookonce.bench.step_report import Measured, StepReport
from lookonce.bench.variants import Variant, set_up
from lookonce.run.open import OpenRun
from lookonce.text import Notify
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.trainer import RunTrainer
from lookonce.train.model.compile import training_on_packs

NUM_WARMUP_STEPS = 2
MIN_SECONDS = 8
"""Fast variants run more epochs, until they have been timed for this long."""
MAX_STEPS = 100_000
"""A limit that is never reached: the clock stops the trainer."""


def bench_step(
    opened: OpenRun,
    examples: Sequence[Example],
    variants: Sequence[Variant],
    num_steps: int = 0,
    notify: Notify = lambda text: None,
) -> Iterator[StepReport]:
    """Train variants and measure them; nothing is saved. `notify` gets notes.

    Each runs at least `num_steps` optimizer steps, or whole epochs if that is 0.

    Yields:
        After each variant the report of all so far, so that a time limit loses only the variant that it interrupts.
    """
    rate = None
    if torch.cuda.is_available():
        device = torch.device("cuda", environment.local_rank())
        torch.cuda.set_device(device)  # else all processes would measure on the first GPU
        rate = matmul_flops_per_second(device, torch.bfloat16)
    samples_per_step = opened.run.batch.samples_per_step
    measured: list[Measured] = []
    for number, variant in enumerate(variants, start=1):
        measured.append(_measure(variant, opened, examples, num_steps, rate, notify))
        missing = tuple(later.name for later in variants[number:])
        num_ranks = environment.num_ranks()
        yield StepReport([*measured], samples_per_step, len(examples), rate and rate / 1e12, num_ranks, missing)


def _measure(
    variant: Variant,
    opened: OpenRun,
    examples: Sequence[Example],
    num_steps: int,
    rate: float | None,
    notify: Notify,
) -> Measured:
    _free_memory()
    batch = opened.run.batch
    in_epoch = math.ceil(len(examples) / batch.samples_per_step)
    with tempfile.TemporaryDirectory() as folder:
        notify(f"{variant.name}: {variant.description}")
        model, trainer = set_up(variant, opened, examples, MAX_STEPS, Path(folder), notify)
        trainer.captures_all = True  # else the measured steps would capture
        clock = _Clock(trainer, num_steps, num_steps or in_epoch)
        compiled = opened.run.train.compile and torch.cuda.is_available()
        with training_on_packs(model, compiled=compiled) if variant.has_packs else contextlib.nullcontext():
            trainer.train()
    share_of_epoch = clock.num_steps / in_epoch
    flops = flops_of_epoch(opened, model, examples, variant.mode) * share_of_epoch
    measured = Measured(
        variant=variant.name,
        description=variant.description,
        num_steps=clock.num_steps,
        num_samples=round(len(examples) * share_of_epoch),
        seconds=clock.seconds,
        warm_up_seconds=clock.warm_up_seconds,
        wait_share=clock.waited / clock.seconds,
        tokens_per_second=sum(example.num_tokens for example in examples) * share_of_epoch / clock.seconds,
        mfu=rate and flops / rate / trainer.args.world_size / clock.seconds,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        losses=[log["loss"] for log in trainer.state.log_history if "loss" in log],
    )
    notify(measured.text())
    return measured


def flops_of_epoch(opened: OpenRun, model: Any, examples: Sequence[Example], mode: str | None) -> int:
    """FLOPs of the matrix products of an epoch in a variant's `batch.mode`."""
    batch = opened.run.batch.model_copy(update={"mode": mode or "separate"})
    sampler = Sampler.of(examples, opened.chat_tokenizer.image_token_id, batch, seed=0)
    packs = (micro_batch.pack for step in sampler.epoch(0) for micro_batch in step)
    return num_flops(model, (group for pack in packs for group in pack.groups), examples)


class _Clock(TrainerCallback):
    """Times a trainer's steps after the warm-up steps, and stops it."""

    def __init__(self, trainer: Any, num_steps: int, multiple: int) -> None:
        """Stop after `num_steps`, or after `MIN_SECONDS` if that is 0, at a multiple of `multiple` steps."""
        self._wanted, self._multiple = num_steps, multiple
        self.num_steps = 0
        self.warm_up_seconds = 0.0
        """Time from the start of training to the first measured step: mostly compilation."""
        self.seconds = self.waited = 0.0
        """Duration of the measured steps, and how long they waited for data."""
        self._began = (time.perf_counter(), 0.0)
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
        self.num_steps = state.global_step - NUM_WARMUP_STEPS
        if self.num_steps == 0:
            ready = self._now()
            self.warm_up_seconds, self._began = ready[0] - self._began[0], ready
        elif self.num_steps > 0 and self.num_steps % self._multiple == 0:
            seconds, waited = self._now()
            self.seconds, self.waited = seconds - self._began[0], waited - self._began[1]
            control.should_training_stop = self._agreed(bool(self._wanted) or self.seconds >= MIN_SECONDS)

    def _agreed(self, is_over: bool) -> bool:
        """Whether it is over on any process: their clocks differ, and all must stop after the same step."""
        accelerator = self._trainer.accelerator
        return bool(accelerator.reduce(torch.tensor(float(is_over), device=accelerator.device), "sum"))

    def _now(self) -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), getattr(self._trainer, "wait_seconds", self._waited)


def _free_memory() -> None:
    """Free the memory of the variant before, whose trainer and callbacks form a cycle; it would count as peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
