"""How much GPU memory a training needs: the measurements behind the table in docs/training.md.

Design: the figures are those of a report (benchmarks/training_h200_2026-11-21.md): LoRA of rank 16, bf16, AdamW. Memory
grows linearly with the tokens of the longest pack, so two measured lengths give it for others. The longest packs for a
card are those of the documented table. Tests compare both with the documents. With quantised weights nothing was
measured: the memory is that of bf16, less what their own size saves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lookonce.run.sections.train import UNQUANTISED, Checkpointing

CARDS_GB = (24, 40, 80, 141)
SPARE = 0.1
"""Share of a card that stays free, for CUDA, for what PyTorch reserves without using it, and for prefetched packs."""
TOLERANCE = 0.03
"""How much less memory than its name says a card may have: an A10 of 24 GB has 23.8."""
LENGTHS = (2048, 7680)
"""Tokens of the two packs whose memory was measured."""
MOST_TOKENS = 16_384
"""The longest pack of the documented table."""
STEP = 128
"""Its lengths are multiples of this; a module without torch cannot take it from packing."""
BYTES = {UNQUANTISED: 2.0, "fp8": 2.0, "int8": 1.03, "nf4": 0.55}
"""Bytes of a frozen weight in the products of the decoder layers, scales included, for each `train.frozen`."""


@dataclass(frozen=True)
class Measured:
    """Memory of one model's training, by `train.gradient_checkpointing`: what was measured, the fastest steps first."""

    hidden_size: int
    num_layers: int
    peaks_gb: dict[Checkpointing, tuple[float, float]]
    """The memory at each of `LENGTHS`."""
    longest: dict[Checkpointing, tuple[int, ...]]
    """The longest pack for each of `CARDS_GB`, in tokens; 0 if none fits."""
    num_quantised: float
    """Billions of weights in the products of the decoder layers, which `train.frozen` can quantise."""


MODELS = {
    "Qwen3-VL-2B": Measured(
        2048, 28, {False: (8.7, 22.4), True: (4.3, 5.9)}, {False: (7168, 13312, 16384, 16384), True: (16384,) * 4}, 1.41
    ),
    "Qwen3-VL-4B": Measured(
        2560,
        36,
        {False: (18.1, 44.4), True: (9.5, 11.9)},
        {False: (2688, 5632, 13312, 16384), True: (16384,) * 4},
        3.63,
    ),
    "Qwen3-VL-8B": Measured(
        4096,
        36,
        {False: (28.8, 60.9), True: (18.3, 21.6)},
        {False: (0, 3200, 9216, 16384), True: (7424, 16384, 16384, 16384)},
        6.95,
    ),
}


def measured_name(model: str, config: Any = None) -> str | None:
    """Which of `MODELS` a model is, by its configuration, or by its Hub name if that is not known; None if none."""
    if config is None:
        found = re.search(r"Qwen3-VL-\d+B", model)
        return found[0] if found and found[0] in MODELS else None
    text = getattr(config, "text_config", config)
    shape = (getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0))
    return next((name for name, one in MODELS.items() if (one.hidden_size, one.num_layers) == shape), None)


def is_measured(name: str, checkpointing: Checkpointing) -> bool:
    """Whether the memory of a model's training was measured with this `train.gradient_checkpointing`."""
    return checkpointing in MODELS[name].peaks_gb


def sparing(name: str, num_tokens: int, gpu_gb: float, checkpointing: Checkpointing, frozen: str) -> Checkpointing:
    """What to set `train.gradient_checkpointing` to on a GPU that is too small with this value: the fastest with which
    packs of this length fit, or the one with the least memory."""
    choices = list(MODELS[name].peaks_gb)
    later = choices[choices.index(checkpointing) + 1 :]
    usable = gpu_gb * (1 - SPARE)
    return next((one for one in later if peak_gb(name, num_tokens, one, frozen) <= usable), choices[-1])


def peak_gb(name: str, num_tokens: int, checkpointing: Checkpointing, frozen: str = UNQUANTISED) -> float:
    """The memory that packs of this length need, in GB, if `is_measured`."""
    (first, last), (low, high) = LENGTHS, MODELS[name].peaks_gb[checkpointing]
    saved = MODELS[name].num_quantised * (BYTES[UNQUANTISED] - BYTES[frozen])
    return low + (num_tokens - first) * (high - low) / (last - first) - saved


def card_of(gpu_gb: float) -> int | None:
    """The largest of `CARDS_GB` that has no more memory than this GPU; None if even the smallest has more."""
    return max((card for card in CARDS_GB if card * (1 - TOLERANCE) <= gpu_gb), default=None)


def longest_pack(name: str, gpu_gb: float, checkpointing: Checkpointing, frozen: str = UNQUANTISED) -> int:
    """The longest pack for a GPU by the documented table, in tokens; 0 if none fits or the GPU is smaller than all.

    With quantised weights it is computed, for a GPU of any size.
    """
    if frozen != UNQUANTISED:
        usable, lengths = gpu_gb * (1 - SPARE), range(MOST_TOKENS, 0, -STEP)
        return next((length for length in lengths if peak_gb(name, length, checkpointing, frozen) <= usable), 0)
    card = card_of(gpu_gb)
    return MODELS[name].longest[checkpointing][CARDS_GB.index(card)] if card else 0
