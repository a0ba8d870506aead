"""GPU memory: the documented measurements beside this run's longest pack and this machine's GPU."""

from __future__ import annotations

from lookonce.checks.model import CheckedModel
from lookonce.checks.report import Result
from lookonce.run.config import RunFile
from lookonce.run.sections.train import UNQUANTISED
from lookonce.train.model.gpu_memory import BYTES, Fit, fits, measured_name, peak_gb, usable_gb

PAGE = "docs/training.md#memory"
USUAL_TOKENS = 2048
"""Shorter packs hold a few images, and their steps are slow."""


def check_memory(run: RunFile, model: CheckedModel, gpu_gb: float | None) -> list[Result]:
    """Whether the longest pack fits the memory of a GPU; `gpu_gb` is None if none is known."""
    config = model.model_folder.config if model.model_folder else None
    name, checkpointing = measured_name(run.model.path, config), run.train.gradient_checkpointing
    frozen = run.train.frozen
    if name is None or not run.batch.has_packs:
        what = "such a model" if name is None else f"batch.mode: {run.batch.mode}"
        return [_not_measured(what)]
    tokens = run.batch.tokens_per_pack
    needed = peak_gb(name, tokens, checkpointing, frozen)
    basis = "" if BYTES[frozen] == BYTES[UNQUANTISED] else f", computed for {frozen} weights and not measured"
    need = f"{name}, packs of {tokens:,} tokens: about {needed:.0f} GB"
    if gpu_gb is None:
        return [Result("ok", "GPU memory", f"{need}{basis}; this machine has no GPU (--gpu-memory names one)")]
    found = f"{need} of {gpu_gb:.0f} GB{basis}"
    if needed <= usable_gb(gpu_gb):
        return [Result("ok", "GPU memory", found)]
    return [Result("error" if needed > gpu_gb else "warning", "GPU memory", found, _advice(name, gpu_gb, run))]


def _not_measured(what: str) -> Result:
    return Result("ok", "GPU memory", f"not measured for {what}; training tries the longest pack first")


def _advice(name: str, gpu_gb: float, run: RunFile) -> str:
    """The keys to change: the fastest steps with packs of a usual length, or the longest packs."""
    frozen, checkpointing = run.train.frozen, run.train.gradient_checkpointing
    found = fits(name, gpu_gb, checkpointing, frozen)
    usual = [fit for fit in found if fit.num_tokens >= USUAL_TOKENS] or found
    if not usual:
        return f"a smaller model, a larger GPU or train.fsdp on several ({PAGE})"
    ways = [(_shorter(fit, run), fit.text(frozen, checkpointing)) for fit in usual[:2]]
    return f"{' or '.join(' with '.join(filter(None, keys)) for keys in ways)} ({PAGE})"


def _shorter(fit: Fit, run: RunFile) -> str:
    """The key of shorter packs; empty if those of the run fit."""
    return f"batch.tokens_per_pack={fit.num_tokens}" if fit.num_tokens < run.batch.tokens_per_pack else ""
