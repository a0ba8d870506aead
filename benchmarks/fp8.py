"""What storing features in 8 bits does: to the features, to logits, to the loss and to LoRA gradients.

    python benchmarks/fp8.py RUN.yaml [--examples 32] [--json]

Makes the run's cache in float32, bfloat16 and fp8_e4m3 and gives the same language model, in float32, the same batches
with features from each. float32 features are the truth; bfloat16 is the yardstick, being what everyone trains on. The
adapter's B matrices are drawn at random, so that all LoRA gradients are there.
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
from lookonce.run.inputs import Inputs
from lookonce.train.data.collate_rows import Collator
from lookonce.train.data.features import CachedFeatures
from lookonce.train.loop.session import Session
from lookonce.train.loop.trainer import token_mean_loss
from lookonce.train.model.load import add_lora, load_without_tower

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


def open_session(run: RunFile, dtype: str) -> Session:
    inputs = Inputs.open(run.model_copy(update={"cache": run.cache.model_copy(update={"dtype": dtype})}))
    inputs.build()
    return Session.open(inputs)


def compare_features(truth: VisionCache, other: VisionCache) -> list[dict[str, float]]:
    """For each level, over all images: relative error (norms) and the mean and lowest cosine of a token."""
    wanted, found = (torch.cat([cache[key].float() for key in truth.keys()]) for cache in (truth, other))
    levels = []
    for level in range(wanted.shape[1]):
        mine, theirs = found[:, level], wanted[:, level]
        cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=-1)
        error = float((mine - theirs).norm() / theirs.norm())
        levels.append({"relative_error": error, "mean_cosine": float(cosine.mean()), "lowest": float(cosine.min())})
    return levels


def compare_model(sessions: dict[str, Session], num_examples: int) -> dict[str, dict[str, float]]:
    """Relative differences to what float32 features give."""
    session = sessions["float32"]
    inputs = session.inputs
    model = add_lora(
        load_without_tower(inputs.model_folder, torch.float32), inputs.model_folder, inputs.run.lora, seed=1
    )
    draw_b_matrices(model)
    model.to(best_device()).eval()
    examples, _ = session.examples("train")
    step = max(len(examples) // num_examples, 1)
    batches = list(chunks(examples[::step][:num_examples], 4))
    outcomes = {dtype: run_batches(model, session.prompter, sessions[dtype].cache, batches) for dtype in DTYPES}
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


def run_batches(model: Any, prompter: Any, cache: VisionCache, batches: list[Any]) -> dict[str, torch.Tensor]:
    collator = Collator(CachedFeatures(cache), prompter.image_token_id, prompter.tokenizer.pad_token_id)
    model.zero_grad()
    logits, losses = [], []
    for examples in batches:
        batch = {name: tensor.to(best_device()) for name, tensor in collator(examples).items()}
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].float()
        labels = batch.pop("labels")
        output = model(**batch, use_cache=False)
        loss = token_mean_loss(output, labels) / len(batches)
        loss.backward()
        logits.append(output.logits[labels[:, 1:] != -100].detach().flatten().cpu())
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
