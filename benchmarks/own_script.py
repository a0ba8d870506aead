"""Measure a training loop of one's own, as in examples/packs.py, beside `lookonce train`: milliseconds a sample.

    python benchmarks/own_script.py --tokenizer Qwen3-VL-tokenizer 2b 8b

Both train the same packs of synthetic images with questions as in Kvasir-VQA. `trainer` is `PackTrainer` as
`lookonce train` sets it up.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import get_peft_model
from transformers import TrainerCallback

from lookonce import PackBatchSampler, PackLoader, VQADataset, load_without_tower, pack_loss, packed_attention
from lookonce.bench.step import VARIANTS, make_run, set_up
from lookonce.environment import best_device
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.train.model.lora import lora_config

NUM_TURNS = 30
"""Epochs of each, of which the last ten are counted: an epoch of few images has packs of some new shapes for long, each
of which is captured then."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--place", type=Path, default=Path("bench"))
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--images", type=int, default=64)
    options = parser.parse_args()
    for model in options.models:
        run = make_run(options.place, model, options.images, options.tokenizer)
        opened = open_run(run, TO_BUILD)
        opened.build()
        of_trainer: list[float] = []
        for name, measure in (("trainer", by_trainer), ("loop", by_loop)):
            gc.collect()
            began = time.perf_counter()
            turns = measure(opened)
            milliseconds = [1000 * seconds / len(opened.records["train"]) for seconds in turns[-10:]]
            found = {"ms a sample": round(statistics.median(milliseconds), 3), "turns": milliseconds}
            of_trainer = of_trainer or milliseconds  # the same packs, epoch by epoch
            ratios = [one / other for one, other in zip(milliseconds, of_trainer, strict=True)]
            found["times the trainer"] = round(statistics.median(ratios), 3)
            seconds = time.perf_counter() - began
            print(json.dumps({"model": model, "way": name, "seconds": seconds} | found), flush=True)


class Turns(TrainerCallback):
    """Notes when an epoch ends, and ends the training after some."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.epoch.is_integer():
            self.ends.append(now())
            control.should_training_stop = len(self.ends) > NUM_TURNS


def by_trainer(opened: OpenRun) -> list[float]:
    """Seconds of each epoch."""
    examples, turns = opened.examples("train")[0], Turns()
    with TemporaryDirectory() as folder:
        _, trainer = set_up(VARIANTS["shared"], opened, examples, 100_000, Path(folder), lambda note: None)
        trainer.add_callback(turns)
        trainer.train()
    return [end - start for start, end in zip(turns.ends, turns.ends[1:], strict=False)]


def by_loop(opened: OpenRun) -> list[float]:
    """Seconds of each epoch."""
    run, on_gpu = opened.run, torch.cuda.is_available()
    dataset = VQADataset(opened.records["train"], opened.cache, opened.model_folder.folder)
    sampler = PackBatchSampler(
        dataset, samples_per_step=run.batch.samples_per_step, tokens_per_pack=run.batch.tokens_per_pack
    )
    model = get_peft_model(load_without_tower(opened.model_folder.folder), lora_config(run.lora)).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=run.train.learning_rate, fused=True)
    ends = [time.perf_counter()]
    with packed_attention(model, compiled=on_gpu, captured=on_gpu):
        num_steps = 0
        for pack in PackLoader(sampler, num_epochs=NUM_TURNS):
            with torch.autocast(best_device().type, torch.bfloat16):
                loss = pack_loss(model, pack)
            loss.backward()
            if pack["ends_step"]:
                torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
                if num_steps % sampler.num_steps == 0:
                    ends.append(now())
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
