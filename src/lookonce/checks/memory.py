"""GPU memory: the documented measurements beside this run's longest pack and this machine's GPU."""

from __future__ import annotations

from lookonce.checks.model import CheckedModel
from lookonce.checks.report import Result
from lookonce.run.config import RunFile
from lookonce.run.sections.train import UNQUANTISED
from lookonce.train.model.gpu_memory import SPARE, is_measured, longest_pack, measured_name, peak_gb, sparing

PAGE = "docs/training.md#memory"


def check_memory(run: RunFile, model: CheckedModel, gpu_gb: float | None) -> list[Result]:
    """Whether the longest pack fits the memory of a GPU; `gpu_gb` is None if none is known."""
    config = model.model_folder.config if model.model_folder else None
    name, checkpointing = measured_name(run.model.path, config), run.train.gradient_checkpointing
    frozen = run.train.frozen
    if name is None or not run.batch.has_packs:
        what = "such a model" if name is None else f"batch.mode: {run.batch.mode}"
        return [_not_measured(what)]
    if not is_measured(name, checkpointing):
        return [_not_measured(f"train.gradient_checkpointing: {checkpointing}")]
    tokens = run.batch.tokens_per_pack
    needed = peak_gb(name, tokens, checkpointing, frozen)
    basis = "" if frozen == UNQUANTISED else f", computed for {frozen} weights and not measured"
    need = f"{name}, packs of {tokens:,} tokens: about {needed:.0f} GB"
    if gpu_gb is None:
        return [Result("ok", "GPU memory", f"{need}{basis}; this machine has no GPU (--gpu-memory names one)")]
    fits = f"{need} of {gpu_gb:.0f} GB{basis}"
    longest = max(longest_pack(name, gpu_gb, checkpointing, frozen), 0)
    if tokens <= longest or needed <= gpu_gb * (1 - SPARE):
        return [Result("ok", "GPU memory", fits)]
    less = sparing(name, tokens, gpu_gb, checkpointing, frozen)
    other = [] if less == checkpointing else [f"train.gradient_checkpointing={str(less).lower()}"]
    advice = _advice(longest, other, run)
    return [Result("error" if needed > gpu_gb else "warning", "GPU memory", fits, advice)]


def _not_measured(what: str) -> Result:
    return Result("ok", "GPU memory", f"not measured for {what}; training tries the longest pack first")


def _advice(longest: int, other: list[str], run: RunFile) -> str:
    """The keys to change, by the documented table."""
    keys = [*([f"batch.tokens_per_pack={longest}"] if longest else []), *other]
    others = ["train.frozen=nf4", "train.fsdp on several GPUs"] if run.train.frozen == UNQUANTISED else []
    return f"{' or '.join(keys or [*others, 'a larger GPU'])} ({PAGE})"
