"""How much GPU memory a training needs, and how long one by rewards takes: measurements behind the documents' tables.

Design: the figures are those of two reports (benchmarks/training_h200_2026-11-23.md, and that of the day after for the
2B): LoRA of rank 16, bf16, AdamW. Memory grows linearly with the tokens of the longest pack, so two measured lengths
give it for others. The documented longest packs for a card follow from them. Tests compare both with the documents.
With quantised weights little was measured: the memory is that of bf16, less nine tenths of what their own size saves.
The time of drawn answers (benchmarks/grpo_h100_2026-11-26.md) grows with their length; 8 answers to a question and 9
questions an image were measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lookonce.run.sections import UNQUANTISED, Checkpointing

CARDS_GB = (12, 16, 24, 40, 80, 141)
SPARE, LEAST_SPARE_GB = 0.1, 2.25
"""What of a GPU stays free, as a share and in GB: CUDA and its graphs take 1.3 to 1.8 GB beside what PyTorch reserves,
and prefetched packs need some."""
LENGTHS = (2048, 7680)
"""Tokens of the two packs whose memory was measured."""
MOST_TOKENS = 16_384
"""The longest pack of the documented table."""
STEP = 128
"""Its lengths are multiples of this; a module without torch cannot take it from packing."""
LEAST_TOKENS = 1024
"""Shorter packs hold one or two images; none is given."""
BYTES = {UNQUANTISED: 2.0, "fp8": 2.0, "int8": 1.03, "nf4": 0.55}
"""Bytes of a frozen weight in the products of the decoder layers, scales included, for each `train.frozen`."""
VOCABULARY, LOGIT_BYTES = 151_936, 12
"""Logits of a target in `MODELS`, and the bytes of each in the backward pass of the loss: three in float32."""
SAVED = 0.9
"""Share of what quantised weights save that is counted on: those of a layer are in bf16 again while it computes."""


@dataclass(frozen=True)
class Measured:
    """Memory of one model's training, by `train.gradient_checkpointing`: what was measured, the fastest steps first."""

    hidden_size: int
    num_layers: int
    peaks_gb: dict[Checkpointing, tuple[float, float]]
    """The memory at each of `LENGTHS`."""
    num_quantised: float
    """Billions of weights in the products of the decoder layers, which `train.frozen` can quantise."""


MODELS = {
    "Qwen3-VL-2B": Measured(2048, 28, {False: (7.9, 17.9), "selective": (6.4, 12.0), True: (5.1, 7.1)}, 1.41),
    "Qwen3-VL-4B": Measured(2560, 36, {False: (16.2, 33.4), "selective": (13.5, 23.4), True: (10.8, 14.0)}, 3.63),
    "Qwen3-VL-8B": Measured(4096, 36, {False: (25.9, 46.9), "selective": (22.5, 34.2), True: (19.8, 23.9)}, 6.95),
}


DRAWN_TOKENS = (8, 64)
DRAWN_MS = {"Qwen3-VL-2B": (0.85, 3.6), "Qwen3-VL-8B": (2.2, 10.49)}
"""Milliseconds an answer of these lengths takes to be drawn, rewarded and trained on, on an H100."""


def measured_name(model: str, config: Any = None) -> str | None:
    """Which of `MODELS` a model is, by its configuration, or by its Hub name if that is not known; None if none."""
    if config is None:
        size = re.search(r"Qwen3-VL-\d+B", model)
        return size[0] if size and size[0] in MODELS else None
    text = getattr(config, "text_config", config)
    shape = (getattr(text, "hidden_size", 0), getattr(text, "num_hidden_layers", 0))
    return next((name for name, size in MODELS.items() if (size.hidden_size, size.num_layers) == shape), None)


def usable_gb(gpu_gb: float) -> float:
    """The memory of a GPU that the peak of a training may take."""
    return gpu_gb - max(SPARE * gpu_gb, LEAST_SPARE_GB)


def peak_gb(name: str, num_tokens: int, checkpointing: Checkpointing, frozen: str = UNQUANTISED) -> float:
    """The memory that packs of this length need, in GB."""
    (first, last), (low, high) = LENGTHS, MODELS[name].peaks_gb[checkpointing]
    saved = SAVED * MODELS[name].num_quantised * (BYTES[UNQUANTISED] - BYTES[frozen])
    return low + (num_tokens - first) * (high - low) / (last - first) - saved


def logits_gb(num_targets: int) -> float:
    """The memory that the loss of this many targets takes beside that: a training on answers has few."""
    return num_targets * VOCABULARY * LOGIT_BYTES / 1e9


def drawn_ms(name: str | None, num_tokens: int) -> float | None:
    """The time that an answer of this length takes in a training by rewards, in milliseconds, if it was measured."""
    if name not in DRAWN_MS:
        return None
    (first, last), (low, high) = DRAWN_TOKENS, DRAWN_MS[name]
    return low + (num_tokens - first) * (high - low) / (last - first)


def longest_pack(name: str, gpu_gb: float, checkpointing: Checkpointing, frozen: str = UNQUANTISED) -> int:
    """The longest pack that fits a GPU, in tokens: a multiple of `STEP`, or 0 if not even `LEAST_TOKENS` do."""
    usable, lengths = usable_gb(gpu_gb), range(MOST_TOKENS, LEAST_TOKENS - 1, -STEP)
    return next((length for length in lengths if peak_gb(name, length, checkpointing, frozen) <= usable), 0)


@dataclass(frozen=True)
class Fit:
    """Settings of the section `train`, and the longest pack that fits a GPU with them."""

    frozen: str
    checkpointing: Checkpointing
    num_tokens: int

    def text(self, frozen: str, checkpointing: Checkpointing) -> str:
        """The keys that differ from these values, as assignments; empty if none does."""
        keys = [f"train.frozen={self.frozen}"] if self.frozen != frozen else []
        if self.checkpointing != checkpointing:
            keys.append(f"train.gradient_checkpointing={str(self.checkpointing).lower()}")
        return " and ".join(keys)


def fits(name: str, gpu_gb: float, checkpointing: Checkpointing = False, frozen: str = UNQUANTISED) -> list[Fit]:
    """The settings with which a GPU is large enough: these values first, then those that need less memory.

    Steps become slower along the list. nf4 is last, because it alone rounds weights.
    """
    choices = list(MODELS[name].peaks_gb)
    later = choices[choices.index(checkpointing) :]
    all_of_them = [(one, other) for one in dict.fromkeys((frozen, "nf4")) for other in later]
    found = [Fit(one, other, longest_pack(name, gpu_gb, other, one)) for one, other in all_of_them]
    return [fit for fit in found if fit.num_tokens]


def hint(
    name: str | None, gpu_gb: float | None, checkpointing: Checkpointing, frozen: str, num_tokens: int = MOST_TOKENS + 1
) -> str:
    """What fits a GPU, for the end of a message that packs of `num_tokens` did not; empty if that is not known."""
    shown = []
    for fit in fits(name, gpu_gb, checkpointing, frozen) if name and gpu_gb else ():
        keys = fit.text(frozen, checkpointing)
        if keys or fit.num_tokens < num_tokens:  # else the measurements would contradict what was seen
            shown.append(f"{fit.num_tokens:,} tokens" + (f" with {keys}" if keys else ""))
    return f"; what fits by docs/training.md#memory: packs of {', '.join(shown)}" if shown else ""


def out_of_memory(gpu_gb: float, tokens_per_pack: int, num_tokens: int | None = None) -> str:
    """What training says if a GPU is out of memory; `num_tokens`: the length of the pack that did not fit, if known."""
    what = f"out of memory: a pack of {num_tokens:,} tokens does not fit" if num_tokens else "out of memory on"
    return (
        f"{what} this GPU of {gpu_gb:.1f} GB; lower batch.tokens_per_pack (now {tokens_per_pack:,}) or set "
        "train.gradient_checkpointing: selective, or true"
    )
