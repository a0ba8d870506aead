"""Ways to train side by side: the same model, records and adapter, step by step through each one's whole pipeline.

Design: times are of whole epochs, so that every way runs the same samples, waiting for data included, on an idle
machine, without the first steps, which warm up. Nothing in between makes the CPU wait for the GPU but what the way does
itself. Tokens are counted as each sample has them when it stands alone, so that ways which run fewer do not look slower
for it. Beside each stands what its matrix products alone would take at the rate that this card reaches in large ones.

Under torchrun the processes share each step as they do in training, and times are of all of them together.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.bench.flops import num_operations
from lookonce.bench.step_report import Measured, StepReport
from lookonce.bench.variants import Way, set_up
from lookonce.text import Notify
from lookonce.train.data.groups import Group
from lookonce.train.data.sampler import Order
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.session import Session
from lookonce.train.loop.trainer import RunTrainer
from lookonce.train.model.compile import training_on_packs

NUM_WARMUP_STEPS = 2
MIN_SECONDS = 8
"""Fast ways make more epochs, until they have been timed so long."""
MAX_STEPS = 100_000
"""Nobody gets there."""


def bench_step(
    session: Session,
    examples: Sequence[Example],
    ways: Sequence[Way],
    num_steps: int = 0,
    notify: Notify = lambda text: None,
) -> Iterator[StepReport]:
    """Train some ways and measure them; nothing is saved. `notify` gets notes.

    Each makes at least `num_steps` optimizer steps, and whole epochs if that is 0.

    Yields:
        As each way ends, the report of all until then: a time limit that comes in the last leaves those before.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))  # else all processes would measure on the first
    rate = products_rate() if torch.cuda.is_available() else None
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    samples_per_step = session.inputs.run.batch.samples_per_step
    measured: list[Measured] = []
    for number, way in enumerate(ways, start=1):
        measured.append(_measure(way, session, examples, num_steps, rate, notify))
        missing = tuple(later.name for later in ways[number:])
        yield StepReport([*measured], samples_per_step, rate and rate / 1e12, num_ranks, missing)


def _measure(
    way: Way,
    session: Session,
    examples: Sequence[Example],
    num_steps: int,
    rate: float | None,
    notify: Notify,
) -> Measured:
    _free_memory()
    batch = session.inputs.run.batch
    in_epoch = math.ceil(len(examples) / batch.samples_per_step)
    with tempfile.TemporaryDirectory() as folder:
        notify(f"{way.name}: {way.says}")
        model, trainer = set_up(way, session, examples, MAX_STEPS, Path(folder), notify)
        clock = _Clock(trainer, num_steps, num_steps or in_epoch)
        compiled = session.inputs.run.train.compile and torch.cuda.is_available()
        with training_on_packs(model, compiled=compiled) if way.has_packs else contextlib.nullcontext():
            trainer.train()
    share_of_epoch = clock.num_steps / in_epoch
    order = Order.of(
        examples, session.prompter.image_token_id, batch.model_copy(update={"mode": way.mode or "separate"}), seed=0
    )
    operations = num_operations(model, _groups(order), examples) * share_of_epoch
    measured = Measured(
        way=way.name,
        says=way.says,
        num_steps=clock.num_steps,
        num_samples=round(len(examples) * share_of_epoch),
        seconds=clock.seconds,
        warm_up_seconds=clock.warm_up_seconds,
        wait_share=clock.waited / clock.seconds,
        tokens_per_second=sum(example.num_tokens for example in examples) * share_of_epoch / clock.seconds,
        products_share=rate and operations / rate / trainer.args.world_size / clock.seconds,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        losses=[log["loss"] for log in trainer.state.log_history if "loss" in log],
    )
    notify(measured.text())
    return measured


def _groups(order: Order) -> Iterable[Group]:
    return (group for step in order.epoch(0) for forward in step for group in forward.pack.groups)


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
    """Times a trainer's steps after those that warm up, and stops it."""

    def __init__(self, trainer: Any, num_steps: int, multiple: int) -> None:
        """After `num_steps`, or if that is 0 after `MIN_SECONDS`, at a multiple of so many steps."""
        self._wanted, self._multiple = num_steps, multiple
        self.num_steps = 0
        self.warm_up_seconds = 0.0
        """Of what came before, from the beginning of training: compilation, mostly."""
        self.seconds = self.waited = 0.0
        """Of these steps, and how long they waited for data."""
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
        """Whether one of all processes says so, whose clocks differ."""
        accelerator = self._trainer.accelerator
        return bool(accelerator.reduce(torch.tensor(float(is_over), device=accelerator.device), "sum"))

    def _now(self) -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), getattr(self._trainer, "wait_seconds", self._waited)


def _free_memory() -> None:
    """Of the way measured before, whose trainer and callbacks hold each other; else it would count as peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
