"""Values for a first run file, each with the reason for it.

Design: a value follows from something stated: the table of GPU memory or the study of step sizes in docs/training.md,
the records, or a default. The reason says which, so that a user can judge it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lookonce.disk_space import with_margin
from lookonce.proposal.facts import Facts
from lookonce.run.sections.batch import BatchSection
from lookonce.run.sections.train import UNQUANTISED
from lookonce.text import size
from lookonce.train.model.gpu_memory import Fit, fits, peak_gb

MEMORY, STEPS = "docs/training.md#memory", "docs/training.md#how-many-samples-a-step"
MOST_TOKENS = 8192
"""The packs of the benchmarks; longer ones were not measured."""
LEAST_TOKENS = 2048
"""The shortest packs whose memory was measured."""
SHARED_STEP = 64
"""Samples of a step in the study of questions that stay together."""
SHARED = 2
"""From this many questions per image on, steps are those of the study."""
MIN_STEPS = 20
"""An epoch has at least this many steps; fewer would say little about the loss."""
LEAST_STEP = 8
"""The smallest step that is proposed for that reason."""
KEPT = 0.99
"""Share of the records that must fit when images are shrunk."""


@dataclass(frozen=True)
class Proposal:
    """A value for a key of the run file."""

    key: str
    """The key with its section: "batch.tokens_per_pack"."""
    value: Any
    """None for a key that is left at its default, whose reason is written all the same."""
    reason: str


def propose(facts: Facts) -> list[Proposal]:
    """All proposals, in the order of the run file."""
    memory = list(_memory(facts))
    tokens = next(one.value for one in memory if one.key == "batch.tokens_per_pack")
    pixels = _max_pixels(facts, min(tokens, BatchSection().max_tokens))
    return [*_thinking(facts), pixels, _dtype(facts, pixels.value), *_targets(facts), _samples_per_step(facts), *memory]


def _thinking(facts: Facts) -> Iterator[Proposal]:
    if facts.thinks:
        reason = "else the chat template lets the model think before it answers, and training refuses all records"
        yield Proposal("data.enable_thinking", False, f"{reason}; docs/models.md#thinking")


def _targets(facts: Facts) -> Iterator[Proposal]:
    if facts.has_linear_attention:
        reason = "the default targets name none of the matrices of linear attention; docs/models.md"
        yield Proposal("lora.targets", "all-linear", reason)


def _memory(facts: Facts) -> Iterator[Proposal]:
    key, default = "batch.tokens_per_pack", BatchSection().tokens_per_pack
    name, gpu_gb = facts.measured, facts.gpu_gb
    if gpu_gb is None:
        yield Proposal(key, default, f"the default: no GPU is on this machine and --gpu-memory was not given; {MEMORY}")
        return
    if name is None:
        yield Proposal(key, default, f"the default: the memory of this model was not measured; {MEMORY} has others")
        return
    fit = next((one for one in fits(name, gpu_gb) if one.num_tokens >= LEAST_TOKENS), None)
    if fit:
        value = min(fit.num_tokens, MOST_TOKENS)
        most = f", and the benchmarks have {value:,}" if fit.num_tokens > value else ""
        how = f" with {keys}" if (keys := fit.text(UNQUANTISED, False)) else ""
        yield Proposal(key, value, f"{name}{how} fits {fit.num_tokens:,} in {gpu_gb:.0f} GB ({MEMORY}){most}")
        yield from _sparing(fit, f"without it, {name} fits no packs of {LEAST_TOKENS:,} in {gpu_gb:.0f} GB; {MEMORY}")
        return
    fit = Fit("nf4", True, LEAST_TOKENS)
    need = f"{name} needs about {peak_gb(name, fit.num_tokens, fit.checkpointing, fit.frozen):.0f} GB and some to spare"
    advice = f"this GPU has {gpu_gb:.0f}: take a smaller model; {MEMORY}"
    yield Proposal(key, fit.num_tokens, f"even so, {need}, and {advice}")
    yield from _sparing(fit, "less memory, for slower steps")


def _sparing(fit: Fit, reason: str) -> Iterator[Proposal]:
    if fit.checkpointing:
        yield Proposal("train.gradient_checkpointing", fit.checkpointing, reason)
    if fit.frozen != UNQUANTISED:
        yield Proposal("train.frozen", fit.frozen, f"{reason}; needs: pip install 'lookonce[qlora]'")


def _samples_per_step(facts: Facts) -> Proposal:
    key, default, each = "batch.samples_per_step", BatchSection().samples_per_step, facts.samples_per_image
    shown = f"{each:.1f} questions per image"
    value, reason = default, f"the default; the records have {shown}"
    if each >= SHARED:
        value, reason = SHARED_STEP, f"with {shown}, steps larger than usual; {STEPS}"
    while value > LEAST_STEP and facts.num_records < value * MIN_STEPS:
        value //= 2
        reason = f"more, and an epoch of {facts.num_records:,} records would have less than {MIN_STEPS} steps"
    return Proposal(key, value, reason)


def _max_pixels(facts: Facts, limit: int) -> Proposal:
    key = "cache.max_pixels"
    longest = max((one.num_tokens for one in facts.sampled), default=0)
    counted = "" if facts.has_tokenizer else "; a byte of text counts as a token, as the model is not on this machine"
    if longest <= limit:
        return Proposal(key, None, f"the longest record has {longest:,} tokens, and {limit:,} fit{counted}")
    wanted = [
        (limit - one.num_text_tokens) // len(one.image_tokens)
        for one in facts.sampled
        if one.image_tokens and one.num_text_tokens < limit
    ]
    tokens = max(sorted(wanted)[int((1 - KEPT) * len(wanted))] if wanted else 1, 1)
    reason = f"so that {KEPT:.0%} of the records fit {limit:,} tokens; the longest has {longest:,}{counted}"
    return Proposal(key, tokens * facts.pixels_per_token, reason)


def _dtype(facts: Facts, max_pixels: int | None) -> Proposal:
    key, needed, free = "cache.dtype", facts.cache_bytes(max_pixels), size(facts.free_bytes)
    if needed is None:
        return Proposal(key, None, f"{free} are free, and `lookonce cache plan` says what bfloat16 needs")
    if with_margin(needed) <= facts.free_bytes:
        return Proposal(key, None, f"bfloat16 needs about {size(needed)}, and {free} are free")
    return Proposal(key, "fp8_e4m3", f"half of bfloat16, which needs about {size(needed)} where {free} are free")
