"""Measure what 8-bit features change: the features themselves, logits, loss and LoRA gradients.

    python benchmarks/fp8.py RUN.yaml [--examples 32] [--json]

Builds the run's cache in float32, bfloat16 and fp8_e4m3, and passes the same batches with features from each through
the same language model, in float32. float32 features are the truth; bfloat16 is the yardstick, because everyone
trains with it. LoRA's B matrices are drawn at random, since they start at zero and the gradients of A would be zero
too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lookonce import read_run_file
from lookonce.cache.store.reader import VisionCache
from lookonce.environment import best_device
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.train.data.batches import IGNORED, CachedFeatures, RowCollator
from lookonce.train.model.load import add_lora, load_without_tower
from lookonce.train.model.loss import weighted_loss

DTYPES = ("float32", "bfloat16", "fp8_e4m3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--examples", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sessions = {dtype: open_session(read_run_file(options.run), dtype) for dtype in DTYPES}
    caches = {dtype: session.cache for dtype, session in sessions.items()}
    report: dict[str, Any] = {"bytes": {dtype: cache.size_bytes for dtype, cache in caches.items()}}
    report["features"] = {dtype: compare_features(caches["float32"], caches[dtype]) for dtype in DTYPES[1:]}
    report["model"] = compare_model(sessions, options.examples)
    print(json.dumps(report, indent=2) if options.json else to_text(report))


def open_session(run: RunFile, dtype: str) -> OpenRun:
    inputs = open_run(run.model_copy(update={"cache": run.cache.model_copy(update={"dtype": dtype})}), TO_BUILD)
    inputs.build()
    return inputs


def compare_features(truth: VisionCache, other: VisionCache) -> list[dict[str, float]]:
    """For each level, over all images: the relative error (of norms), and the mean and lowest cosine of a token."""
    expected, found = (torch.cat([cache[key].float() for key in truth.keys()]) for cache in (truth, other))
    levels = []
    for level in range(expected.shape[1]):
        stored, exact = found[:, level], expected[:, level]
        cosine = torch.nn.functional.cosine_similarity(stored, exact, dim=-1)
        error = float((stored - exact).norm() / exact.norm())
        levels.append({"relative_error": error, "mean_cosine": float(cosine.mean()), "lowest": float(cosine.min())})
    return levels


def compare_model(sessions: dict[str, OpenRun], num_examples: int) -> dict[str, dict[str, float]]:
    """Logits, loss and gradients: relative differences from those with float32 features."""
    session = sessions["float32"]
    inputs = session
    model = add_lora(
        load_without_tower(inputs.model_folder, torch.float32), inputs.model_folder, inputs.run.lora, seed=1
    )
    draw_b_matrices(model)
    model.to(best_device()).eval()
    examples, _ = session.examples("train")
    step = max(len(examples) // num_examples, 1)
    batches = list(chunks(examples[::step][:num_examples], 4))
    outcomes = {dtype: run_batches(model, session.chat_tokenizer, sessions[dtype].cache, batches) for dtype in DTYPES}
    truth = outcomes["float32"]
    return {
        dtype: {name: float((outcomes[dtype][name] - truth[name]).norm() / truth[name].norm()) for name in truth}
        for dtype in DTYPES[1:]
    }


def draw_b_matrices(model: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=generator)


def run_batches(model: Any, chat_tokenizer: Any, cache: VisionCache, batches: list[Any]) -> dict[str, torch.Tensor]:
    collator = RowCollator.of(chat_tokenizer, CachedFeatures(cache))
    model.zero_grad()
    logits, losses = [], []
    for examples in batches:
        batch = {name: tensor.to(best_device()) for name, tensor in collator(examples).items()}
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].float()
        targets, weights = batch.pop("targets"), batch.pop("weights")
        found = model(**batch, use_cache=False).logits
        loss = weighted_loss(found, targets, weights) / len(batches)
        loss.backward()
        logits.append(found[targets != IGNORED].detach().flatten().cpu())
        losses.append(loss.detach().cpu())
    gradients = [p.grad.flatten().cpu() for p in model.parameters() if p.requires_grad]
    return {"logits": torch.cat(logits), "loss": torch.stack(losses).sum(), "gradients": torch.cat(gradients)}


def chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def to_text(report: dict[str, Any]) -> str:
    lines = [f"{dtype:10} {number:>15,} bytes" for dtype, number in report["bytes"].items()]
    for dtype, levels in report["features"].items():
        for number, level in enumerate(levels):
            values = ", ".join(f"{name} {value:.6f}" for name, value in level.items())
            lines.append(f"{dtype:10} level {number}: {values}")
    for dtype, values in report["model"].items():
        lines.append(f"{dtype:10} " + ", ".join(f"{name} {value:.2e}" for name, value in values.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
