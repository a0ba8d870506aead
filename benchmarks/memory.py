"""How long packs may be on cards of 24, 40, 80 and 141 GB: peaks of a few trainings, and the line through them.

    python benchmarks/memory.py --model 8b --tokenizer Qwen3-VL-tokenizer

Trains two steps with packs of several lengths, with and without gradient checkpointing, everything as users run it:
LoRA of rank 16 on all linear layers, bf16, AdamW, compiled. Memory grows by the token, so two lengths make a line and a
third shows whether it is one. A tenth of a card is left to spare, for what PyTorch reserves and does not use.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path

import torch

from lookonce.text import table
from lookonce.train.attention import padded_length
from lookonce.train.bench_data import make_run
from lookonce.train.fast_layers import training_on_packs
from lookonce.train.inputs import Inputs
from lookonce.train.session import Session
from lookonce.train.ways import WAYS, set_up

CARDS_GB = (24, 40, 80, 141)
SPARE = 0.1
LENGTHS = (2048, 8192, 4096)
"""Of packs; the line goes through the first two."""


def peak_of(place: Path, model: str, tokenizer: Path | None, length: int, checkpointing: bool) -> tuple[int, float]:
    """Tokens of the longest pack of two steps, and the peak in GB."""
    changes = [
        f"batch.tokens_per_pack={length}",
        "batch.samples_per_step=256",
        f"train.gradient_checkpointing={str(checkpointing).lower()}",
    ]
    inputs = Inputs.open(make_run(place, model, 64, tokenizer, changes))
    inputs.build()
    session = Session.open(inputs)
    examples, _ = session.examples("train")
    on_gpu = torch.cuda.is_available()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trained, trainer = set_up(WAYS["shared"], session, examples, 2, Path(folder), lambda note: None)
        with training_on_packs(trained, compiled=inputs.run.train.compile and on_gpu):
            trainer.train()
    num_tokens = padded_length(max(trainer.feed.order.lengths(0)))
    return num_tokens, torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0


def largest(points: list[tuple[int, float]], card_gb: float) -> str:
    """Of the packs on the line through two points that fit a card, in tokens."""
    (one, low), (other, high) = points[:2]
    slope = (high - low) / (other - one)
    tokens = int((card_gb * (1 - SPARE) - low) / slope) + one if slope else 0
    return f"{tokens // 128 * 128:,}" if tokens >= 1024 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["2b", "4b", "8b"], required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    options = parser.parse_args()
    lines = []
    for checkpointing in (False, True):
        points = []
        for length in LENGTHS:
            points.append(peak_of(options.place, options.model, options.tokenizer, length, checkpointing))
            print(json.dumps([options.model, checkpointing, *points[-1]]), file=sys.stderr, flush=True)
        name = f"{options.model}{', checkpointing' if checkpointing else ''}"
        peaks = [f"{peak:.1f} at {tokens:,}" for tokens, peak in points]
        lines.append((name, *peaks, *(largest(points, card) for card in CARDS_GB)))
    print(table(("", *(["peak GB"] * len(LENGTHS)), *(f"{card} GB" for card in CARDS_GB)), lines))


if __name__ == "__main__":
    main()
