"""Measure several trainings in turns on one GPU, so that all of them meet the same temperature and clock.

    python benchmarks/turns.py --tokenizer Qwen3-VL-tokenizer "8b plain" "8b liger" "8b shared" "8b fp8"
    python benchmarks/turns.py --tokenizer Qwen3-VL-tokenizer "8b@24 nf4 batch.tokens_per_pack=2048" "2b@12 selective"
    python benchmarks/turns.py --tokenizer Qwen3-VL-tokenizer "qwen2_5_vl/7b plain steps=3" "qwen2_5_vl/7b shared"

A training is a model, a variant of `lookonce bench step`, and keys of the run file. `@24` limits its memory to that of
a card of 24 GB, and `steps=3` takes turns of that many steps; by default a turn is an epoch. Each training is a process
of its own. When all have compiled and warmed up, one trains at a time. All must fit the GPU together, so a larger
comparison is several commands. Printed are the median of a training's turns and how many times as fast it is as the
first one. With `--profile FOLDER` each training is profiled after its last turn; step_profile.py reads the traces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.profiler import profile
from transformers import TrainerCallback

from lookonce.bench.step import VARIANTS, data_folder, flops_of_epoch, make_run, matmul_flops_per_second, set_up
from lookonce.errors import LookonceError
from lookonce.families.lookup import DEFAULT
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.text import first_line

OUTSIDE_GB = 1.75
"""Memory of a limited card that is left to CUDA itself and its graphs."""
NUM_PROFILED = 3
"""Steps of a turn that is profiled."""
COLUMNS = "training | ms a sample | | tokens/s | of matmul rate | GB reserved | start, s | ms of each turn".split("|")


@dataclass(frozen=True)
class Cell:
    """One training of the comparison."""

    text: str
    family: str
    model: str
    card_gb: float | None
    variant: str
    settings: tuple[str, ...]
    num_steps: int
    """Steps of a turn; 0 for an epoch."""

    @classmethod
    def of(cls, text: str) -> Cell:
        where, variant, *assignments = text.split()
        named, _, card = where.partition("@")
        family, _, model = named.rpartition("/")
        steps = [one.partition("=")[2] for one in assignments if one.startswith("steps=")]
        settings = tuple(one for one in assignments if not one.startswith("steps="))
        family = family or DEFAULT.model_type
        return cls(text, family, model, float(card) if card else None, variant, settings, int(steps[0]) if steps else 0)

    def inputs(self, options: Any) -> OpenRun:
        """The training's inputs; writes the model and builds the cache if they are missing."""
        place = (options.place, self.model, options.images, options.tokenizer, self.settings, self.family)
        inputs = open_run(make_run(*place), TO_BUILD)
        began = time.perf_counter()
        if built := inputs.build().num_encoded:
            say(f"{self.family} {self.model}: encoded {built} images in {time.perf_counter() - began:.1f} s")
        return inputs


class Turns(TrainerCallback):
    """Trains for a turn at each request after the warm-up, which is one turn too; reports the seconds of each."""

    def __init__(self, trainer: Any, num_steps: int, replies: IO[str]) -> None:
        self._num_steps, self._replies = num_steps, replies
        self._left, self._began = num_steps, 0.0
        self._profile: tuple[Any, str] | None = None
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._left -= 1
        if self._left:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        reply(self._replies, seconds=time.perf_counter() - self._began, peak_gb=reserved_gb())
        if self._profile:
            profiler, trace = self._profile
            profiler.stop()
            profiler.export_chrome_trace(trace)
        request, _, trace = sys.stdin.readline().strip().partition(" ")
        self._left = NUM_PROFILED if trace else self._num_steps
        self._profile = (profile(), trace) if trace else None
        if self._profile:
            self._profile[0].start()
        control.should_training_stop = request != "turn"
        self._began = time.perf_counter()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def reply(replies: IO[str], **values: Any) -> None:
    replies.write(json.dumps(values) + "\n")
    replies.flush()


def reserved_gb() -> float:
    return torch.cuda.max_memory_reserved() / 1e9 if torch.cuda.is_available() else 0.0


def work(cell: Cell, options: Any) -> None:
    """Train one cell, as stdin says; replies are JSON lines on stdout, which nothing else writes to."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    session = OpenRun.open(cell.inputs(options))
    examples, _ = session.examples("train")
    samples = session.run.batch.samples_per_step
    num_steps = cell.num_steps or math.ceil(len(examples) / samples)
    if cell.card_gb and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((cell.card_gb - OUTSIDE_GB) * 1e9 / total)
    variant = VARIANTS[cell.variant]
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, trainer = set_up(variant, session, examples, 100_000, Path(folder), say)
            trainer.captures_all = True
            share = min(num_steps * samples / len(examples), 1.0) if cell.num_steps else 1.0
            reply(
                replies,
                samples=len(examples) * share,
                tokens=sum(one.num_tokens for one in examples) * share,
                flops=flops_of_epoch(session, model, examples, variant.mode) * share,
            )
            Turns(trainer, num_steps, replies)
            trainer.train()
    except (LookonceError, torch.OutOfMemoryError) as error:
        reply(replies, error=first_line(error))


class Worker:
    """The process of one training."""

    def __init__(self, cell: Cell, arguments: list[str]) -> None:
        self.cell, self._began = cell, time.perf_counter()
        command = [sys.executable, __file__, *arguments, "--worker", cell.text]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts: dict[str, Any] = {}
        self.seconds: list[float] = []
        self.start_seconds = 0.0

    def wait_until_warm(self) -> None:
        for _ in range(2):  # its facts, and its first turn, which is not measured
            self._read()
        self.start_seconds = time.perf_counter() - self._began

    def train(self) -> None:
        """One turn."""
        if not self.failed:
            self._tell("turn")
            self._read()
            self.seconds.append(self.facts["seconds"])

    def record(self, folder: Path) -> None:
        """A turn of a few steps whose trace is written to a folder."""
        if not self.failed:
            self._tell(f"turn {folder.absolute() / re.sub('[^a-z0-9.]+', '-', self.cell.text)}.json.gz")
            self._read()

    @property
    def failed(self) -> bool:
        return "error" in self.facts

    def end(self) -> None:
        self._tell("end")
        self._process.communicate()

    def _tell(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(text + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _read(self) -> None:
        if not self.failed:
            line = self._process.stdout.readline()  # type: ignore[union-attr]
            self.facts |= json.loads(line) if line else {"error": "ended; its error is above"}

    def row(self, first: Worker, rate: float | None) -> tuple[str, ...]:
        """What the table says."""
        if self.failed or not self.seconds:
            return (self.cell.text, self.facts.get("error", "no turn").partition(";")[0], *[""] * (len(COLUMNS) - 2))
        seconds = statistics.median(self.seconds)
        factor = "" if first.failed else f"{first.ms() / self.ms():.2f}x"
        share = f"{self.facts['flops'] / rate / seconds:.1%}" if rate else "-"
        rates = (f"{self.ms():.3f}", factor, f"{self.facts['tokens'] / seconds:,.0f}", share)
        turns = ", ".join(f"{1e3 * one / self.facts['samples']:.3f}" for one in self.seconds)
        return (self.cell.text, *rates, f"{self.facts['peak_gb']:.1f}", f"{self.start_seconds:.0f}", turns)

    def ms(self) -> float:
        return 1e3 * statistics.median(self.seconds) / float(self.facts["samples"])


def outside_gb(workers: list[Worker]) -> float:
    """What a process uses of the GPU beside what PyTorch reserves, on average."""
    free, total = torch.cuda.mem_get_info()
    running = [worker for worker in workers if not worker.failed]
    return ((total - free) / 1e9 - sum(one.facts["peak_gb"] for one in running)) / max(len(running), 1)


def measure(cells: list[Cell], options: Any) -> None:
    """Train all cells in turns and print the table."""
    arguments = ["--place", str(options.place), "--images", str(options.images)]
    arguments += ["--tokenizer", str(options.tokenizer)] if options.tokenizer else []
    for text in {f"{cell.family}/{cell.model} shared": None for cell in cells}:  # the files of a model are written once
        if not data_folder(options.place, (one := Cell.of(text)).family, one.model, options.images).exists():
            subprocess.run([sys.executable, __file__, *arguments, "--prepare", text], check=True)
    workers = [Worker(cell, arguments) for cell in cells]
    for worker in workers:
        worker.wait_until_warm()
    rate = None
    if torch.cuda.is_available():
        say(f"a process uses {outside_gb(workers):.2f} GB outside PyTorch")
        rate = matmul_flops_per_second(torch.device("cuda"), torch.bfloat16)
        say(f"products of 8192 x 8192 x 8192: {rate / 1e12:.0f} TFLOP/s")
    for number in range(options.rounds):
        for worker in workers:
            if number < options.slow_rounds or worker.cell.variant not in ("plain", "liger", "cached"):
                worker.train()
    for worker in workers if options.profile else ():
        worker.record(options.profile)
    print(f"| {' | '.join(column.strip() for column in COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for worker in workers:
        worker.end()
        print(f"| {' | '.join(worker.row(workers[0], rate))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", type=Cell.of)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each training")
    parser.add_argument("--slow-rounds", type=int, default=1, help="turns of plain, liger and cached")
    parser.add_argument("--profile", type=Path, help="an existing folder for a trace of each training")
    parser.add_argument("--worker", type=Cell.of, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", type=Cell.of, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
    elif options.prepare:
        options.prepare.inputs(options)
    else:
        measure(options.cells, options)


if __name__ == "__main__":
    main()
