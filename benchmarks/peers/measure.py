"""What the scripts beside this file share: their arguments, the records, the clock, and the JSON that each writes.

It needs transformers and nothing of lookonce, so that it runs in an environment made for another tool.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

NUM_WARMUP_STEPS = 2
RANK, ALPHA, DROPOUT = 16, 32, 0.0
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Modules of the language model: the tower's have other names."""
LEARNING_RATE = 1e-5
PATCHES_PER_TOKEN = 4
WHOLE_EPOCH = 100_000
"""Forward passes that a step accumulates at most, which are all of an epoch."""
PACKAGES = ("torch", "transformers", "peft", "accelerate", "triton", "liger-kernel", "flash-attn", "flash-attn-4")
SEED = 42
SETTINGS = ("attention", "checkpointing", "workers", "tokens", "packs", "turns")


def arguments(description: str | None, numbers: dict[str, int] | None = None, **flags: bool) -> argparse.Namespace:
    """The arguments of all scripts, and some numbers and flags with their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("peers"), help="what make_data.py wrote")
    parser.add_argument("--model", default="2b")
    parser.add_argument("--questions", type=int, default=10, choices=(1, 2, 4, 10), help="about each image")
    parser.add_argument("--steps", type=int, default=6, help=f"{NUM_WARMUP_STEPS} of them to warm up")
    parser.add_argument("--samples", type=int, default=96, help="of each step")
    parser.add_argument("--rows", type=int, default=4, help="rows of a forward pass that is not packed")
    parser.add_argument("--packs", type=int, default=6, help="packs of a step; six have about 96 samples")
    parser.add_argument("--tokens", type=int, default=8192, help="of a pack at most")
    parser.add_argument("--workers", type=int, default=8, help="processes that load data")
    parser.add_argument("--attention", default="sdpa", help="as transformers names it")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--first", action="store_true", help="one step on the first samples alone, for its loss")
    parser.add_argument("--turns", action="store_true", help="all questions about an image as one conversation")
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    for name, default in flags.items():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
    for name, number in (numbers or {}).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    options.data, options.out = options.data.absolute(), options.out.absolute()
    options.folder = options.data / options.model / "model"
    processor = json.loads((options.folder / "preprocessor_config.json").read_text())
    options.max_pixels = processor["size"]["longest_edge"]  # tools have limits of their own
    options.steps = 1 if options.first else options.steps
    return options


def read(options: argparse.Namespace, num_steps: int | None = None) -> list[dict[str, str]]:
    """`image`, `question` and `answer` of the records of all steps, or of some, in their order, repeated as needed."""
    lines = (options.data / f"q{options.questions}.jsonl").read_text().splitlines()
    records = [
        {"image": str(options.data / record["images"][0])} | record["turns"][0] for record in map(json.loads, lines)
    ]
    return [*islice(cycle(records), (num_steps or options.steps) * options.samples)]


def conversations(options: argparse.Namespace) -> list[dict[str, object]]:
    """The records as ms-swift and LLaMA-Factory read them: each alone, or with `--turns` all about an image as one."""
    records = read(options)
    by_image = groupby(records, lambda record: record["image"]) if options.turns else ((None, [one]) for one in records)
    return [_conversation([*some]) for _, some in by_image]


def _conversation(records: list[dict[str, str]]) -> dict[str, object]:
    turns = [
        {"role": role, "content": "<image>" * (number == 0 and role == "user") + record[key]}
        for number, record in enumerate(records)
        for role, key in (("user", "question"), ("assistant", "answer"))
    ]
    return {"messages": turns, "images": [records[0]["image"]]}


class Clock(transformers.TrainerCallback):
    """Notes when each step of a trainer of transformers ends, what it trained on, and its loss."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.num_samples: list[int] = []
        """Images of each step, as many as samples, since each sample has one."""
        self.num_tokens: list[int] = []
        """Tokens of each step, without padding."""
        self.num_targets: int | None = None
        """Supervised tokens of the first step."""
        self.num_image_tokens: int | None = None
        """Image tokens of the first step: equal if all tools make the same pixels of the images."""
        self.num_passes: list[int] = []
        """Forward passes of each step."""
        self.waits: list[float] = []
        """Seconds that each step waited for its batches."""
        self.num_trained = 0

    @classmethod
    def of_all_trainers(cls) -> Clock:
        """A clock that every trainer made from now on calls."""
        clock = cls()
        transformers.trainer.DEFAULT_CALLBACKS.append(clock)
        return clock

    def count(self, pad_token: int) -> None:
        """Count what each step trains on, in the batches that it gets."""
        get = transformers.Trainer.get_batch_samples  # now, since Unsloth has one of its own

        def counted(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = get(*arguments, **named)
            self.waits.append(time.perf_counter() - start)
            self.num_passes.append(len(found[0]))
            self.num_samples.append(sum(len(batch["image_grid_thw"]) for batch in found[0]))
            self.num_tokens.append(sum(int((batch["input_ids"] != pad_token).sum()) for batch in found[0]))
            if self.num_targets is None:
                self.num_targets = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in found[0])
                patches = sum(int(batch["image_grid_thw"].prod(-1).sum()) for batch in found[0])
                self.num_image_tokens = patches // PATCHES_PER_TOKEN
            return found

        transformers.Trainer.get_batch_samples = counted

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        """Check that only LoRA weights of the language model are trained, and begin to count."""
        self.count(getattr(processing_class, "tokenizer", processing_class).pad_token_id)
        trained = {name: weight.numel() for name, weight in model.named_parameters() if weight.requires_grad}
        if wrong := [name for name in trained if "lora_" not in name or "visual" in name]:
            sys.exit(f"these should not be trained: {wrong[:5]}")
        self.num_trained = sum(trained.values())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.time())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def report(tool: str, package: str, options: argparse.Namespace, clock: Clock, **settings: Any) -> None:
    """Write and print the figures."""
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    tokens = json.loads((options.data / "tokens.json").read_text())[f"q{options.questions}"]
    steps = [*zip(seconds, clock.num_tokens[1:], strict=False)][NUM_WARMUP_STEPS - 1 :]  # the first has no beginning
    # of a sample of mean length: a tool that packs begins with the longest samples, so its steps have ever more of them
    of_token = sum(second for second, _ in steps) / sum(number for _, number in steps) if steps else None
    mean = statistics.mean(tokens)
    if options.turns and steps:  # a question's share of its conversation
        num_questions = options.questions * sum(clock.num_samples[NUM_WARMUP_STEPS : len(clock.ends)])
        mean = sum(number for _, number in steps) / num_questions
    on_gpu = torch.cuda.is_available()
    found = {
        "tool": tool,
        "versions": versions(package),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "model": options.model,
        "questions_per_image": options.questions,
        "settings": settings | {name: getattr(options, name) for name in SETTINGS},
        "trained_weights": clock.num_trained,
        "first_loss": clock.losses[0],
        "first_targets": clock.num_targets,
        "first_image_tokens": clock.num_image_tokens,
        "samples_of_steps": clock.num_samples[: len(clock.ends)],
        "tokens_of_steps": clock.num_tokens[: len(clock.ends)],
        "passes_of_steps": clock.num_passes[: len(clock.ends)],
        "step_seconds": seconds,
        "wait_seconds": clock.waits[: len(clock.ends)],
        "ms_per_sample": of_token and 1e3 * of_token * mean,
        "ms_per_sample_of_steps": [1e3 * second / number * mean for second, number in steps],
        "wait_share": sum(clock.waits[NUM_WARMUP_STEPS : len(clock.ends)]) / sum(seconds[1:]) if steps else None,
        "tokens_per_second": of_token and 1 / of_token,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else None,
        "seconds_to_first_step": clock.ends[0] - psutil.Process().create_time(),
    }
    write(options, found)
    print(json.dumps(found), flush=True)


def write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the JSON."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def versions(*packages: str) -> dict[str, str | None]:
    """The versions of some packages and of those that matter for speed; None for those that are not installed."""
    return {name: _version(name) for name in (*packages, *PACKAGES)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
