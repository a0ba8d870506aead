"""Find how long packs may be on cards of 12 to 141 GB, from the peak memory of a few trainings.

    python benchmarks/memory.py --model 8b --tokenizer Qwen3-VL-tokenizer
    python benchmarks/memory.py --model 8b --tokenizer Qwen3-VL-tokenizer --frozen nf4 --checkpointing selective
    python benchmarks/memory.py --model 8b --tokenizer Qwen3-VL-tokenizer --documented 80 --checkpointing selective

Trains two steps with packs of several lengths, for each `train.gradient_checkpointing`, with the settings of users:
LoRA of rank 16 on all linear layers, bf16, AdamW, compiled, CUDA graphs where possible. Memory grows linearly with
the tokens, so two lengths determine a line and a third shows whether it is one. The peak is the memory that the
training reports before its first step. A tenth of a card is left free for memory outside PyTorch (CUDA itself, the
graphs), for what PyTorch reserves without using it, and for prefetched packs.

With `--check` it then trains with the lengths that it found, and limits PyTorch to the memory of the card. With
`--documented` it trains the lengths of docs/training.md for a card of that memory, on all of this card, and prints
what the table counts on beside what was needed. A step has the number of samples with which the longest pack of both
steps is as long as possible; its length is printed too.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lookonce.bench.step import VARIANTS, make_run, set_up
from lookonce.errors import TrainingError
from lookonce.run.open import TO_BUILD, open_run
from lookonce.run.sections import UNQUANTISED, BatchSection, Checkpointing
from lookonce.text import table
from lookonce.train.data.packing import padded_length
from lookonce.train.data.sampler import Sampler
from lookonce.train.loop.warmup import WarmUp
from lookonce.train.model.gpu_memory import CARDS_GB, SPARE, longest_pack, peak_gb, usable_gb

LENGTHS = (2048, 8192, 4096)
"""Lengths of packs in tokens; the line goes through the first two."""
LEAST, MOST = 1024, 16384
"""The range of pack lengths in tokens; the least holds about two of Kvasir-VQA's images."""
NUM_STEPS = 2
CHECKPOINTING: dict[str, Checkpointing] = {"false": False, "selective": "selective", "true": True}


def peak_of(options: Any, length: int, checkpointing: str, card_gb: float | None = None) -> tuple[int, float]:
    """Train two steps; return the tokens of the longest pack, padding included, and the peak in GB.

    PyTorch may use `card_gb` of memory. Without a GPU both results are 0. Records longer than a pack are left out.

    Raises:
        TrainingError: the training does not fit.
    """
    changes = [
        f"batch.tokens_per_pack={length}",
        f"train.gradient_checkpointing={checkpointing}",
        f"train.frozen={options.frozen}",
    ]
    run = make_run(options.place, options.model, options.images, options.tokenizer, changes)
    session = open_run(run, TO_BUILD)
    session.build()
    examples, _ = session.examples("train")
    batch = filling(Sampler.of(examples, session.chat_tokenizer.image_token_id, run.batch, run.train.seed))
    session = session.changed(run=run.model_copy(update={"batch": batch}))
    limit_memory(card_gb)
    with tempfile.TemporaryDirectory() as folder:
        model, trainer = set_up(VARIANTS["shared"], session, examples, NUM_STEPS, Path(folder), lambda note: None)
        trainer.train()
    trials = [one.trial for one in trainer.callback_handler.callbacks if isinstance(one, WarmUp) and one.trial]
    return (padded_length(trials[0].num_tokens), trials[0].peak_bytes / 1e9) if trials else (0, 0.0)


def filling(sampler: Sampler) -> BatchSection:
    """The sampler's batch with the number of samples a step whose longest pack is the longest.

    Steps of a few samples more need two packs, which are balanced and so about half as long.
    """
    average = sum(group.num_tokens for group in sampler.groups) / len(sampler.examples)
    fitting = int(sampler.batch.tokens_per_pack / average)
    batches = [
        sampler.batch.model_copy(update={"samples_per_step": number}) for number in range(fitting // 2, fitting + 1)
    ]

    def longest(batch: BatchSection) -> int:
        packs = replace(sampler, batch=batch).upcoming(0, NUM_STEPS)
        return max(micro_batch.pack.num_tokens for micro_batch in packs)

    return max(batches, key=longest)


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


def documented(options: Any, checkpointing: str) -> tuple[str, ...]:
    """Train the documented length for a card; return a row of what the table counts on and of what was needed.

    Memory beside PyTorch's is what the card has in use after the training, so nothing else may run on it.
    """
    name, chosen, card = f"Qwen3-VL-{options.model.upper()}", CHECKPOINTING[checkpointing], options.documented
    length = longest_pack(name, card, chosen, options.frozen)
    tokens, peak = peak_of(options, length, checkpointing)
    reserved = used = 0
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        reserved, used = torch.cuda.max_memory_reserved(), total - free
    expected = peak_gb(name, tokens, chosen, options.frozen)
    memory = (usable_gb(card), expected, peak, reserved / 1e9, used / 1e9)
    setting = f"{options.model} {options.frozen}, checkpointing: {checkpointing}"
    row = (setting, f"{length:,}", f"{tokens:,}", *(f"{number:.1f}" for number in memory))
    log(*row)
    return row


def log(*values: Any) -> None:
    print(json.dumps(values), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--frozen", default=UNQUANTISED, help="train.frozen")
    parser.add_argument("--checkpointing", nargs="+", choices=CHECKPOINTING, default=[*CHECKPOINTING])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--check", action="store_true", help="train with the lengths that were found")
    parser.add_argument("--documented", type=float, metavar="GB", help="train the documented lengths for such a card")
    options = parser.parse_args()
    if options.documented:
        header = ("", "tokens", "trained", "may need GB", "table", "peak", "reserved", "on the card")
        print(table(header, [documented(options, one) for one in options.checkpointing]), flush=True)
        return
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
