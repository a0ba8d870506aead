"""Compare the gradients of a trained adapter with rounded frozen weights to those without rounding, layer by layer.

    python benchmarks/frozen.py runs/sample [--frozen fp8 int8 nf4] [--batches 16]
    python benchmarks/frozen.py --model 2b --tokenizer Qwen3-VL-tokenizer --steps 300

Takes a run folder with its adapter; or writes a model of some size and made-up data, as `lookonce bench step` does, and
first trains an adapter on unrounded weights for some steps. Then each kind of frozen weights gets that same adapter,
without dropout, and computes the same steps of the training records. The truth is unrounded weights in float32. The
yardstick is bfloat16, because everyone trains with it: unrounded weights, rounded to bfloat16 if their files have more,
and autocast. Kinds compute in the run's `train.precision`, so in a run in bf16 their errors contain the yardstick's. A
second yardstick is the data: the truth of the next step in place of this one's.

One model at a time is in memory, and of each only the gradients stay, on the CPU. What this costs: the adapter was
trained without rounding, so a part of an error may be that it does not fit the rounded weights. `frozen_learning.py`
measures what is learned.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lookonce.bench.step import VARIANTS, make_run, set_up
from lookonce.environment import best_device
from lookonce.run.open import FROM_CACHE, TO_BUILD, OpenRun, open_run
from lookonce.run.sections import UNQUANTISED
from lookonce.selftest.model import Passes, ieee_float32
from lookonce.train.data.dataset import DataCollatorForPacks, PackBatchSampler, VQADataset
from lookonce.train.model.compile import checkpointed
from lookonce.train.model.frozen import check_frozen
from lookonce.train.model.load import PRECISIONS, add_lora, load_weights, load_without_tower
from lookonce.train.model.packs import packed_attention

KINDS = ("fp8", "int8", "nf4")
TRUTH, YARDSTICK, NEXT = "float32", "bfloat16", "next step"
LEARNING_RATE = 2e-4
"""The learning rate of an adapter on made-up data, unless `--set train.learning_rate=...` names another."""
Gradients = dict[str, torch.Tensor]
Step = tuple[float, Gradients]
"""Loss and gradients."""


@dataclass
class Compared:
    """Sums over all steps of the scalar products of gradients, by part of the model: found x true, found², true²."""

    loss: float = 0.0
    sums: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, found: list[Step], truth: list[Step]) -> Compared:
        compared = cls(sum(loss for loss, _ in found) / len(found))
        for (_, one), (_, other) in zip(found, truth, strict=True):
            for name, gradient in one.items():
                compared.add(name, gradient.flatten().double(), other[name].flatten().double())
        return compared

    def add(self, name: str, found: torch.Tensor, true: torch.Tensor) -> None:
        products = torch.stack([found @ true, found @ found, true @ true])
        for part in parts_of(name):
            self.sums[part] = self.sums.get(part, 0) + products

    def of_part(self, part: str) -> tuple[float, float, float]:
        """The norm of the difference and that of the gradient, both as shares of the true norm, and the cosine."""
        both, found, true = self.sums[part].tolist()
        return (
            math.sqrt(max(found - 2 * both + true, 0) / true),
            math.sqrt(found / true),
            both / math.sqrt(found * true),
        )


def parts_of(name: str) -> list[str]:
    """The parts of the model that a trained weight belongs to: its layer, its kind of layer, everything."""
    if match := re.search(r"layers\.(\d+)\..*?(\w+)\.lora_", name):
        return [f"layer {match[1]}", match[2], "all"]
    return [name.partition(".modules_to_save")[0].rpartition(".")[2], "all"]


def opened_by(options: argparse.Namespace) -> tuple[OpenRun, Path]:
    """The session and the adapter of a trained run, or of a new one on made-up data."""
    if options.run:
        opened = open_run(options.run, replace(FROM_CACHE, adapter=True), options.set)
        return opened, opened.folder.adapter
    settings = [f"train.learning_rate={LEARNING_RATE}", *options.set]
    run = make_run(options.place, options.model, options.images, options.tokenizer, settings)
    open_run(run, TO_BUILD).build()
    session = open_run(run, FROM_CACHE)
    return session, train_adapter(session, options.steps)


def train_adapter(session: OpenRun, num_steps: int) -> Path:
    """Train an adapter on unrounded weights; returns the folder with it."""
    examples, adapter = session.examples("train")[0], session.run.output / "adapter"
    with TemporaryDirectory() as folder:
        model, trainer = set_up(VARIANTS["shared"], session, examples, num_steps, Path(folder), say)
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    say(f"trained {num_steps} steps: loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    model.save_pretrained(str(adapter))
    return adapter


def is_compiled(session: OpenRun) -> bool:
    return session.run.train.compile and torch.cuda.is_available()


def steps_with(session: OpenRun, adapter: Path, precision: str, frozen: str, num_steps: int) -> Iterator[Step]:
    """Loss and gradients of the first steps of the training."""
    run, model_folder, device = session.run, session.model_folder, best_device()
    model = load_without_tower(model_folder, PRECISIONS[precision], run.model.attention, frozen)
    model = add_lora(model, model_folder, run.lora.model_copy(update={"dropout": 0.0}), run.train.seed)
    load_weights(model, adapter)
    model.to(device).train()
    examples, source = session.examples("train")[0], session.features
    batch = run.batch.model_copy(update={"mode": "shared"})
    sampler = PackBatchSampler.of(VQADataset.of(examples, session.chat_tokenizer, source), batch, run.train.seed)
    collator, passes = (
        DataCollatorForPacks(sampler.dataset, device=device),
        Passes(model, PRECISIONS[precision], device),
    )
    on_packs = packed_attention(model, compiled=is_compiled(session), flex=run.train.flex_attention)
    with ieee_float32(), on_packs, checkpointed(model, run.train.gradient_checkpointing):
        for packs in sampler.steps(0, num_steps):
            loss = sum(float(passes.run(collator(sampler.dataset.__getitems__(one)))) for one in packs)
            yield loss, {name: one.grad.cpu() for name, one in model.named_parameters() if one.grad is not None}
            model.zero_grad(set_to_none=True)


def compare(session: OpenRun, adapter: Path, kinds: list[str], num_steps: int) -> dict[str, Compared]:
    """Each way to compute beside the truth."""
    of_run = session.run.train.precision
    ways = {TRUTH: ("fp32", UNQUANTISED), YARDSTICK: ("bf16", UNQUANTISED)} | {one: (of_run, one) for one in kinds}
    truth: list[Step] = []
    found: dict[str, Compared] = {}
    for name, way in ways.items():
        with contextlib.closing(steps_with(session, adapter, *way, num_steps)) as steps:
            these = list(steps)
        truth = truth or these
        found[name] = Compared.of(these, truth)
        say(summary_row(name, found[name]))
        free_memory()
    return found | {NEXT: Compared.of(truth[1:] + truth[:1], truth)}


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def to_markdown(found: dict[str, Compared]) -> str:
    """How far each way is from the truth: in all, and by part of the model."""
    others = {name: compared for name, compared in found.items() if name != TRUTH}
    lines = ["| | loss | distance | norm | cosine |", "|---|---|---|---|---|"]
    lines += [summary_row(name, compared) for name, compared in found.items()]
    lines += ["", f"| | {' | '.join(others)} |", f"|{'---|' * (1 + len(others))}"]
    for part in sorted(found[TRUTH].sums, key=lambda part: (part == "all", not part.startswith("layer "))):
        of_part = (compared.of_part(part) for compared in others.values())
        lines.append(f"| {part} | {' | '.join(f'{distance:.1%} ({cosine:.4f})' for distance, _, cosine in of_part)} |")
    return "\n".join(lines)


def summary_row(name: str, compared: Compared) -> str:
    distance, norm, cosine = compared.of_part("all")
    return f"| {name} | {compared.loss:.4f} | {distance:.1%} | {norm:.3f} | {cosine:.4f} |"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a trained run: its folder or its run file")
    parser.add_argument("--frozen", nargs="+", default=KINDS)
    parser.add_argument("--batches", type=int, default=16, help="steps whose gradients are compared")
    parser.add_argument("--set", action="append", default=[], help="a value of the run file, as for lookonce")
    parser.add_argument("--model", help="a model of `lookonce bench step`, instead of a run")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="steps to train the adapter of --model")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--place", type=Path, default=Path("bench"))
    options = parser.parse_args()
    if bool(options.run) == bool(options.model):
        parser.error("name either a run or --model")
    for kind in options.frozen:
        check_frozen(kind)  # before a training of minutes
    session, adapter = opened_by(options)
    free_memory()
    print(to_markdown(compare(session, adapter, options.frozen, options.batches)))


if __name__ == "__main__":
    main()
