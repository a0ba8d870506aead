"""Train in the memory of smaller cards: what fits, how fast, with how much memory.

    python benchmarks/cards.py --tokenizer Qwen3-VL-tokenizer [8b:24:precision:selective:4096 ...]

A cell is a model, a card's gigabytes, `train.frozen`, `train.gradient_checkpointing` and `batch.tokens_per_pack`. Each
trains some steps with the settings of users: LoRA of rank 16 on all linear layers, bf16, AdamW, compiled, CUDA graphs,
packs from the cache. PyTorch may take what a card has beside what CUDA itself takes. Printed are samples and tokens a
second, padding not counted, and the peak of both together; or that memory ran out. Without cells it trains `CELLS`.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.bench.synthetic import make_run
from lookonce.bench.variants import VARIANTS, set_up
from lookonce.errors import TrainingError
from lookonce.run.inputs import RunInputs
from lookonce.train.loop.session import Session
from lookonce.train.model.compile import training_on_packs

CELLS = (
    "8b:24:precision:selective:2048 8b:24:precision:true:7424 8b:24:fp8:true:4096 "
    "8b:24:int8:false:2048 8b:24:int8:selective:4096 8b:24:nf4:false:2048 8b:24:nf4:selective:4096 "
    "8b:16:int8:true:2048 8b:16:nf4:selective:2048 8b:16:nf4:true:8192 "
    "4b:16:precision:selective:2048 4b:16:precision:true:8192 4b:16:nf4:false:2048 4b:12:nf4:selective:2048 "
    "2b:16:precision:false:4096 2b:16:precision:selective:8192 "
    "2b:12:precision:false:2048 2b:12:precision:selective:4096"
).split()
WARM_UP = 2
"""Steps that are not timed."""


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    model: str
    card_gb: float
    frozen: str
    checkpointing: str
    tokens: int

    @classmethod
    def of(cls, text: str) -> Cell:
        model, card_gb, frozen, checkpointing, tokens = text.split(":")
        return cls(model, float(card_gb), frozen, checkpointing, int(tokens))

    def settings(self, options: Any) -> list[str]:
        return [
            f"batch.tokens_per_pack={self.tokens}",
            f"batch.samples_per_step={options.samples}",
            f"train.frozen={self.frozen}",
            f"train.gradient_checkpointing={self.checkpointing}",
        ]


class Clock(TrainerCallback):
    """Times the steps after the first ones."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.began = self.ended = (0.0, 0)
        trainer.add_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (WARM_UP, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.began, self.ended = self.ended, (time.perf_counter(), self._trainer.num_tokens)


def outside_pytorch() -> int:
    """Bytes of the GPU that are in use and not PyTorch's: CUDA itself and its graphs."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def limit_memory(card_gb: float) -> None:
    """Free the memory of the training before, and limit PyTorch to a card's, without what CUDA takes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min((card_gb * 1e9 - outside_pytorch()) / total, 1.0))


def train(cell: Cell, options: Any) -> str:
    """Train a cell; returns what the table says."""
    inputs = RunInputs.open(
        make_run(options.place, cell.model, options.images, options.tokenizer, cell.settings(options))
    )
    inputs.build()
    session = Session.open(inputs)
    examples, num_too_long = session.examples("train")
    limit_memory(cell.card_gb)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, trainer = set_up(
                VARIANTS["shared"], session, examples, WARM_UP + options.steps, Path(folder), lambda note: None
            )
            trainer.captures_all, clock = True, Clock(trainer)
            with training_on_packs(model, compiled=inputs.run.train.compile and torch.cuda.is_available()):
                trainer.train()
    except (TrainingError, torch.OutOfMemoryError) as error:
        return f"| {str(error).partition(';')[0]} | |"
    (began, tokens_before), (ended, tokens) = clock.began, clock.ended
    rates = (number / (ended - began) for number in (options.samples * options.steps, tokens - tokens_before))
    peak = (torch.cuda.max_memory_reserved() + outside_pytorch()) / 1e9 if torch.cuda.is_available() else 0.0
    left_out = f", {num_too_long} records left out" if num_too_long else ""
    return f"| {' | '.join(f'{rate:,.0f}' for rate in rates)} | {peak:.1f}{left_out} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--samples", type=int, default=96, help="samples a step")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    options = parser.parse_args()
    print("| model | card GB | frozen | checkpointing | tokens a pack | samples/s | tokens/s | peak GB |")
    print("|---|---|---|---|---|---|---|---|")
    for cell in map(Cell.of, options.cells):
        names = f"| {cell.model} | {cell.card_gb:g} | {cell.frozen} | {cell.checkpointing} | {cell.tokens:,} "
        print(names + train(cell, options), flush=True)


if __name__ == "__main__":
    main()
