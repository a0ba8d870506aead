"""Find how long packs may be on cards of 12 to 141 GB, from the peak memory of a few trainings.

    python benchmarks/memory.py --model 8b --tokenizer Qwen3-VL-tokenizer
    python benchmarks/memory.py --model 8b --tokenizer Qwen3-VL-tokenizer --frozen nf4 --checkpointing selective

Trains two steps with packs of several lengths, for each `train.gradient_checkpointing`, with the settings of users:
LoRA of rank 16 on all linear layers, bf16, AdamW, compiled, CUDA graphs where possible. Memory grows linearly with
the tokens, so two lengths determine a line and a third shows whether it is one. The peak is the memory that the
training reports before its first step. A tenth of a card is left free for memory outside PyTorch (CUDA itself, the
graphs), for what PyTorch reserves without using it, and for prefetched packs.

With `--check` it then trains with the lengths that it found, and limits PyTorch to the memory of the card. Packs are
balanced, so the longest is somewhat shorter than the limit; both lengths are printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from lookonce.bench.step import VARIANTS, make_run, set_up
from lookonce.errors import TrainingError
from lookonce.run.open import TO_BUILD, open_run
from lookonce.run.sections import UNQUANTISED
from lookonce.text import table
from lookonce.train.data.packing import padded_length
from lookonce.train.loop.warmup import WarmUp
from lookonce.train.model.gpu_memory import CARDS_GB, SPARE

LENGTHS = (2048, 8192, 4096)
"""Lengths of packs in tokens; the line goes through the first two."""
LEAST, MOST = 1024, 16384
"""The range of pack lengths in tokens; the least holds about two of Kvasir-VQA's images."""


def peak_of(options: Any, length: int, checkpointing: str, card_gb: float | None = None) -> tuple[int, float]:
    """Train two steps; return the tokens of the longest pack, padding included, and the peak in GB.

    PyTorch may use `card_gb` of memory. Without a GPU both results are 0. Records longer than a pack are left out.

    Raises:
        TrainingError: the training does not fit.
    """
    changes = [
        f"batch.tokens_per_pack={length}",
        "batch.samples_per_step=256",
        f"train.gradient_checkpointing={checkpointing}",
        f"train.frozen={options.frozen}",
    ]
    inputs = open_run(make_run(options.place, options.model, options.images, options.tokenizer, changes), TO_BUILD)
    inputs.build()
    session = inputs
    examples, _ = session.examples("train")
    limit_memory(card_gb)
    with tempfile.TemporaryDirectory() as folder:
        model, trainer = set_up(VARIANTS["shared"], session, examples, 2, Path(folder), lambda note: None)
        trainer.train()
    trials = [one.trial for one in trainer.callback_handler.callbacks if isinstance(one, WarmUp) and one.trial]
    return (padded_length(trials[0].num_tokens), trials[0].peak_bytes / 1e9) if trials else (0, 0.0)


def limit_memory(card_gb: float | None) -> None:
    """Free the memory of the previous training and limit PyTorch to `card_gb`, or to all of the GPU if None."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(card_gb * 1e9 / total, 1.0) if card_gb else 1.0)


def largest(points: list[tuple[int, float]], card_gb: float) -> int:
    """The longest pack, in tokens, that fits a card according to the line through the first two points; 0 if none."""
    (one, low), (other, high) = points[:2]
    if other == one:
        return 0
    tokens = int((card_gb * (1 - SPARE) - low) * (other - one) / (high - low)) + one
    return next((length for length in range(MOST, LEAST - 1, -128) if padded_length(length) <= tokens), 0)


def check(options: Any, length: int, checkpointing: str, card_gb: float) -> str:
    """Train with packs of this length in the memory of a card; return the peak, or the error."""
    try:
        num_tokens, peak = peak_of(options, length, checkpointing, card_gb)
    except TrainingError as error:
        return str(error)
    return f"{peak:.1f} GB with packs of up to {num_tokens:,} tokens"


def log(*values: Any) -> None:
    print(json.dumps(values), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--frozen", default=UNQUANTISED, help="train.frozen")
    parser.add_argument("--checkpointing", nargs="+", default=["false", "selective", "true"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--check", action="store_true", help="train with the lengths that were found")
    options = parser.parse_args()
    lines, found = [], []
    for checkpointing in options.checkpointing:
        points = []
        for length in options.lengths:
            points.append(peak_of(options, length, checkpointing))
            log(options.model, checkpointing, *points[-1])
        lengths = [largest(points, card) for card in CARDS_GB]
        name = f"{options.model} {options.frozen}, checkpointing: {checkpointing}"
        peaks = [f"{peak:.1f} at {tokens:,}" for tokens, peak in points]
        lines.append((name, *peaks, *(f"{length:,}" if length else "-" for length in lengths)))
        found += [(length, checkpointing, card) for length, card in zip(lengths, CARDS_GB, strict=True) if length]
    print(table(("", *(["peak GB"] * len(options.lengths)), *(f"{card} GB" for card in CARDS_GB)), lines), flush=True)
    for length, checkpointing, card in found if options.check else ():
        log(options.model, checkpointing, card, length, check(options, length, checkpointing, card))


if __name__ == "__main__":
    main()
