"""Measure training variants side by side: the same model, records and adapter, through each variant's whole pipeline.

Reading, batches, Trainer's loop, optimizer and logging are timed over whole epochs, so every variant runs the same
samples. Waiting for data is included; the first steps, which warm up, are not. The measurement adds no host-device sync
between its first and last step. Under torchrun the processes share each step as they do in training, and times are of
all of them together. Synthetic data have the sizes and questions of Kvasir-VQA's frames.

FLOPs are those of the products of matrices that cannot be left out; a multiplication and an addition are two. A frozen
weight is used in the forward and in the backward pass (4 FLOPs a token), an adapter's weight also has a gradient (6).
`lm_head` and what follows the keys and values of the last layer run on targets only. Attention multiplies queries, keys
and values for every pair of tokens of which one attends to the other: two products in the forward and five in the
backward pass (https://arxiv.org/abs/2205.14135); that of the last layer is not counted. Of layers of linear attention
only the products with weights are counted: their state is no product of all pairs.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn import Linear
from transformers import Trainer, TrainerCallback, TrainingArguments

from lookonce import environment
from lookonce.datasets.sample.write import write_sample
from lookonce.errors import UsageError
from lookonce.families.family import Family
from lookonce.families.lookup import DEFAULT
from lookonce.files import write_text
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.open import OpenRun
from lookonce.run.sections import UNQUANTISED, Frozen
from lookonce.run.startup import Startup
from lookonce.text import Notify, count, duration, quiet, table
from lookonce.train.data.batches import CachedFeatures, FeatureSource, Pixels
from lookonce.train.data.dataset import DataCollatorForRows, VQADataset
from lookonce.train.data.packing import Group
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.log_files import STOCK_PRINTERS
from lookonce.train.loop.session import make_trainer
from lookonce.train.loop.trainer import PackTrainer
from lookonce.train.model.frozen import check_frozen
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import PRECISIONS, add_lora, head_size, load_with_tower, load_without_tower, text_model

KEYS_AND_VALUES = ("k_proj", "v_proj")
"""The products of the last layer that all its tokens need."""


def num_flops(model: Any, groups: Iterable[Group], examples: Sequence[Example]) -> int:
    """FLOPs of one forward and backward pass over the prefixes and branches of `groups`."""
    config, layers = text_model(model).config, text_model(model).layers
    of_target: int = 4 * config.hidden_size * config.vocab_size
    of_token = 0
    for name, module in layers.named_modules():
        if flops := _of_token(module, config):
            number, *parts = name.split(".")
            if number == str(len(layers) - 1) and not set(KEYS_AND_VALUES) & set(parts):
                of_target += flops
            else:
                of_token += flops
    tokens = targets = pairs = 0
    for group in groups:
        tokens += group.num_tokens
        targets += sum(int(examples[number].supervised.sum()) for number in group.examples)
        pairs += num_pairs(group)
    num_layers = len(layers) - len(linear_layers(text_model(model)))
    of_pair: int = 14 * (num_layers - 1) * config.num_attention_heads * head_size(config)
    return of_token * tokens + of_target * targets + of_pair * pairs


def _of_token(module: Any, config: Any) -> int:
    """FLOPs of a layer for one token, 0 for what is no product. A token goes through a few of the experts only."""
    if isinstance(module, Linear):
        return int(module.in_features * module.out_features * (6 if module.weight.requires_grad else 4))
    num_experts = getattr(config, "num_experts", 0)
    weights = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3 and len(weight) == num_experts]
    return 4 * sum(map(torch.numel, weights)) // num_experts * int(config.num_experts_per_tok) if weights else 0


def num_pairs(group: Group) -> int:
    """Pairs of tokens of which one attends to the other; a token attends to itself."""
    prefix = group.num_prefix_tokens
    branches = zip_longest(group.branch_tokens, group.shared_tokens, fillvalue=0)
    return _triangle(prefix) + sum(_triangle(prefix + end) - _triangle(prefix + shared) for end, shared in branches)


def _triangle(number: int) -> int:
    return number * (number + 1) // 2


SIZE = 8192
"""Rows and columns of the matrices on a GPU; an eighth of it on a CPU."""
NUM_PRODUCTS = 30


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """The median over some products of random matrices, each timed alone, so that the first ones do not count."""
    size = SIZE if device.type == "cuda" else SIZE // 8
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(NUM_PRODUCTS):
        synchronize(device)
        start = time.perf_counter()
        left @ right
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, so that a clock shows when its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


HEADER = (
    "",
    "samples/s",
    "ms/sample",
    "",
    "tokens/s",
    "of matmul rate",
    "wait",
    "peak GB",
    "epoch",
    "before",
    "first loss",
)
FORMER = {"variant": "way", "description": "says", "matmul_share": "products_share"}
"""The keys of JSON that differ from the fields: those of the first version, which called variants ways."""


@dataclass(frozen=True)
class Measured:
    variant: str
    description: str
    num_steps: int
    num_samples: int
    seconds: float
    warm_up_seconds: float
    """Time before the measured steps: the trial of packs with its compilation and capturing, and the first steps."""
    wait_share: float
    """Share of the time that was spent waiting for data."""
    tokens_per_second: float
    """Each sample's tokens are counted as if it stood alone, without padding."""
    matmul_share: float | None
    """FLOPs of the language model's matrix products over those that the GPU reaches; None without a GPU."""
    peak_gb: float | None
    losses: list[float]
    """Logged losses. Variants that see the same samples in the first step have the same first loss."""

    @property
    def ms_per_sample(self) -> float:
        return 1e3 * self.seconds / self.num_samples

    def text(self) -> str:
        rate = "" if self.matmul_share is None else f", {_percent(self.matmul_share)} of the matmul rate"
        peak = "" if self.peak_gb is None else f", peak {_gigabytes(self.peak_gb)} GB"
        return f"{self.variant}: {self.ms_per_sample:.2f} ms per sample{rate}, wait {_percent(self.wait_share)}{peak}"

    def to_json(self) -> dict[str, Any]:
        values = {FORMER.get(name, name): value for name, value in vars(self).items()}
        return values | {"ms_per_sample": self.ms_per_sample}


@dataclass(frozen=True)
class StepReport:
    measured: list[Measured]
    samples_per_step: int
    samples_per_epoch: int
    tflops: float | None
    """TFLOP/s that the GPU reaches in large matrix products."""
    num_ranks: int = 1
    missing: tuple[str, ...] = ()
    """Variants that were not measured to the end."""

    def speedup(self, measurement: Measured) -> float:
        """How many times faster a variant is than the first."""
        return self.measured[0].ms_per_sample / measurement.ms_per_sample

    def text(self) -> str:
        lines = [f"{each.variant}: {each.description} ({count(each.num_steps, 'step')})" for each in self.measured]
        lines += [f"not measured: {', '.join(self.missing)}"] if self.missing else []
        lines += [f"matmul rate: {self.tflops:.0f} TFLOP/s, measured in large products"] if self.tflops else []
        samples = count(self.samples_per_epoch, "training sample")
        shared = f", shared by {self.num_ranks} processes" if self.num_ranks > 1 else ""
        if any(VARIANTS[measurement.variant].has_packs for measurement in self.measured):
            lines.append("pack: a training sequence of several samples, without padding")
        lines.append(f"epoch: the {samples} of this run; before: compilation and first steps")
        lines.append(f"{self.samples_per_step} samples per step{shared}")
        return "\n".join([table(HEADER, list(map(self._row, self.measured))), *(f"  {line}" for line in lines)])

    def _row(self, measurement: Measured) -> tuple[str, ...]:
        return (
            measurement.variant,
            f"{1e3 / measurement.ms_per_sample:.1f}",
            f"{measurement.ms_per_sample:.2f}",
            f"{self.speedup(measurement):.1f}x",
            f"{measurement.tokens_per_second:,.0f}",
            _percent(measurement.matmul_share),
            _percent(measurement.wait_share),
            _gigabytes(measurement.peak_gb),
            duration(measurement.ms_per_sample * self.samples_per_epoch / 1e3),
            duration(measurement.warm_up_seconds),
            f"{measurement.losses[0]:.4f}",
        )

    def to_json(self) -> dict[str, Any]:
        totals = {name: value for name, value in vars(self).items() if name != "measured"}
        return {"ways": [measurement.to_json() for measurement in self.measured]} | totals


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _gigabytes(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"


CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)
"""The name of the stock Trainer's setting, which has no other form; the second is that of transformers 5.17."""
PLAIN_ROWS = 4
"""Rows per forward pass of stock training, a common setting: more do not fit a GPU of 80 GB."""


@dataclass(frozen=True)
class Variant:
    name: str
    description: str
    mode: str | None
    """The run file's `batch.mode`; None for the stock Trainer's batches."""
    has_tower: bool
    package: str = ""
    frozen: Frozen | None = None
    """Its `train.frozen`, if not that of the run file."""

    @property
    def has_packs(self) -> bool:
        return self.mode in ("packed", "shared")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain", "stock Trainer, padded rows, tower in every step", None, True),
        Variant("liger", "the same with Liger's kernels", None, True, "liger_kernel"),
        Variant("cached", "padded rows, features from the cache", "separate", False),
        Variant("tower", "packs, each question with its own image, tower in every step", "packed", True),
        Variant("packed", "packs, each question with its own image, from the cache", "packed", False),
        Variant("shared", "packs, questions share their image, from the cache", "shared", False),
        Variant("fp8", "shared, frozen products in fp8", "shared", False, frozen="fp8"),
    )
}


def find_variants(names: Sequence[str]) -> list[Variant]:
    """The variants with these names; Liger's is last, because it replaces transformers' classes permanently.

    Raises:
        UsageError: a name is unknown, or what its variant needs is not installed, or the GPU cannot multiply in fp8.
    """
    for name in names:
        if name not in VARIANTS:
            raise UsageError(f"no training variant is named {name!r}; choose from {', '.join(VARIANTS)}")
        package = VARIANTS[name].package
        if package and importlib.util.find_spec(package) is None:
            raise UsageError(f"{name} needs {package}; install it with: pip install liger-kernel")
        check_frozen(VARIANTS[name].frozen or UNQUANTISED, "train.frozen")
    return sorted((VARIANTS[name] for name in names), key=lambda variant: variant.name == "liger")


def set_up(
    variant: Variant, opened: OpenRun, examples: Sequence[Example], num_steps: int, folder: Path, notify: Notify
) -> tuple[Any, Any]:
    """A model with a new adapter, and a trainer of `num_steps` steps that saves nothing; `notify` gets its notes."""
    if variant.name == "liger":
        _patch_with_liger(opened.model_folder.family)
    opened = opened.changed(run=_run_of(variant, opened.run))
    run, model_folder = opened.run, opened.model_folder
    load = load_with_tower if variant.has_tower else load_without_tower
    model = load(model_folder, PRECISIONS[run.train.precision], run.model.attention, run.train.frozen)
    model = add_lora(model, model_folder, run.lora, run.train.seed)
    arguments: dict[str, Any] = {
        "max_steps": num_steps,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    if variant.mode is None:
        return model, _stock_trainer(opened, model, examples, folder, arguments)
    source: FeatureSource = CachedFeatures(opened.cache)
    if variant.has_tower:
        source = Pixels(opened.processor, opened.images.path_of)
    settings = training_arguments(run, folder, **arguments)
    return model, make_trainer(opened, model, settings, examples, startup=Startup(notify), source=source)


def _patch_with_liger(family: Family) -> None:
    import liger_kernel.transformers

    patch = getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{family.model_type}", None)
    if patch is None:
        raise UsageError(f"the installed liger-kernel has no kernels for {family.name}; leave out the variant liger")
    patch()


def _run_of(variant: Variant, run: RunFile) -> RunFile:
    changes = {"mode": variant.mode, "samples_per_forward": PLAIN_ROWS} if variant.mode else {}
    train = run.train.model_copy(update={"frozen": variant.frozen} if variant.frozen else {})
    return run.model_copy(update={"batch": run.batch.model_copy(update=changes), "train": train})


def _stock_trainer(
    opened: OpenRun, model: Any, examples: Sequence[Example], folder: Path, arguments: dict[str, Any]
) -> Any:
    run = opened.run
    rows = min(PLAIN_ROWS, run.batch.samples_per_step)
    rows_of_all_ranks = rows * environment.num_ranks()
    settings = training_arguments(
        run,
        folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=max(run.batch.samples_per_step // rows_of_all_ranks, 1),
        dataloader_num_workers=min(len(os.sched_getaffinity(0)) - 1, 8) if torch.cuda.is_available() else 0,
        dataloader_pin_memory=torch.cuda.is_available(),
        **arguments | {CHECKPOINTING: bool(run.train.gradient_checkpointing)},
    )
    pixels = Pixels(opened.processor, opened.images.path_of)
    collate = DataCollatorForRows(VQADataset.of(examples, opened.chat_tokenizer, pixels))
    trainer = Trainer(model, settings, data_collator=collate, train_dataset=examples)
    for printer in STOCK_PRINTERS:
        trainer.remove_callback(printer)
    return trainer


NUM_WARMUP_STEPS = 2
MIN_SECONDS = 8
"""Fast variants run more epochs, until they have been timed for this long."""
MAX_STEPS = 100_000
"""A limit that is never reached: the clock stops the trainer."""


def bench_step(
    opened: OpenRun,
    examples: Sequence[Example],
    variants: Sequence[Variant],
    num_steps: int = 0,
    notify: Notify = quiet,
) -> Iterator[StepReport]:
    """Train variants and measure them; nothing is saved. `notify` gets notes.

    Each runs at least `num_steps` optimizer steps, or whole epochs if that is 0.

    Yields:
        After each variant the report of all so far, so that a time limit loses only the variant that it interrupts.
    """
    rate = None
    if torch.cuda.is_available():
        device = torch.device("cuda", environment.local_rank())
        torch.cuda.set_device(device)  # else all processes would measure on the first GPU
        rate = matmul_flops_per_second(device, torch.bfloat16)
    samples_per_step = opened.run.batch.samples_per_step
    measured: list[Measured] = []
    for number, variant in enumerate(variants, start=1):
        measured.append(_measure(variant, opened, examples, num_steps, rate, notify))
        missing = tuple(later.name for later in variants[number:])
        num_ranks = environment.num_ranks()
        yield StepReport([*measured], samples_per_step, len(examples), rate and rate / 1e12, num_ranks, missing)


def _measure(
    variant: Variant, opened: OpenRun, examples: Sequence[Example], num_steps: int, rate: float | None, notify: Notify
) -> Measured:
    _free_memory()
    batch = opened.run.batch
    in_epoch = math.ceil(len(examples) / batch.samples_per_step)
    with tempfile.TemporaryDirectory() as folder:
        notify(f"{variant.name}: {variant.description}")
        model, trainer = set_up(variant, opened, examples, MAX_STEPS, Path(folder), notify)
        trainer.captures_all = True  # else the measured steps would capture
        clock = _Clock(trainer, num_steps, num_steps or in_epoch)
        trainer.train()
    share_of_epoch = clock.num_steps / in_epoch
    flops = flops_of_epoch(opened, model, examples, variant.mode) * share_of_epoch
    measured = Measured(
        variant=variant.name,
        description=variant.description,
        num_steps=clock.num_steps,
        num_samples=round(len(examples) * share_of_epoch),
        seconds=clock.seconds,
        warm_up_seconds=clock.warm_up_seconds,
        wait_share=clock.waited / clock.seconds,
        tokens_per_second=sum(example.num_tokens for example in examples) * share_of_epoch / clock.seconds,
        matmul_share=rate and flops / rate / trainer.args.world_size / clock.seconds,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        losses=[log["loss"] for log in trainer.state.log_history if "loss" in log],
    )
    notify(measured.text())
    return measured


def flops_of_epoch(opened: OpenRun, model: Any, examples: Sequence[Example], mode: str | None) -> int:
    """FLOPs of the matrix products of an epoch in a variant's `batch.mode`."""
    batch = opened.run.batch.model_copy(update={"mode": mode or "separate"})
    sampler = Sampler.of(examples, opened.chat_tokenizer.image_token_id, batch, seed=0)
    packs = (micro_batch.pack for step in sampler.epoch(0) for micro_batch in step)
    return num_flops(model, (group for pack in packs for group in pack.groups), examples)


class _Clock(TrainerCallback):
    """Times a trainer's steps after the warm-up steps, and stops it."""

    def __init__(self, trainer: Any, num_steps: int, multiple: int) -> None:
        """Stop after `num_steps`, or after `MIN_SECONDS` if that is 0, at a multiple of `multiple` steps."""
        self._num_requested, self._multiple = num_steps, multiple
        self.num_steps = 0
        self.warm_up_seconds = 0.0
        """Time from the start of training to the first measured step: mostly compilation."""
        self.seconds = self.waited = 0.0
        """Duration of the measured steps, and how long they waited for data."""
        self._began = (time.perf_counter(), 0.0)
        self._trainer, self._waited = trainer, 0.0
        if not isinstance(trainer, PackTrainer):
            self._get, trainer.get_batch_samples = trainer.get_batch_samples, self._timed
        trainer.add_callback(self)

    def _timed(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        batches = self._get(*arguments)
        self._waited += time.perf_counter() - start
        return batches

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps = state.global_step - NUM_WARMUP_STEPS
        if self.num_steps == 0:
            ready = self._now()
            self.warm_up_seconds, self._began = ready[0] - self._began[0], ready
        elif self.num_steps > 0 and self.num_steps % self._multiple == 0:
            seconds, waited = self._now()
            self.seconds, self.waited = seconds - self._began[0], waited - self._began[1]
            control.should_training_stop = self._agreed(bool(self._num_requested) or self.seconds >= MIN_SECONDS)

    def _agreed(self, is_over: bool) -> bool:
        """Whether it is over on any process: their clocks differ, and all must stop after the same step."""
        accelerator = self._trainer.accelerator
        return bool(accelerator.reduce(torch.tensor(float(is_over), device=accelerator.device), "sum"))

    def _now(self) -> tuple[float, float]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter(), getattr(self._trainer, "wait_seconds", self._waited)


def _free_memory() -> None:
    """Free the memory of the variant before, whose trainer and callbacks form a cycle; it would count as peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def data_folder(folder: Path, family: str, model: str, num_images: int) -> Path:
    return folder / "-".join((*([] if family == DEFAULT.model_type else [family]), model, str(num_images)))


def make_run(
    folder: Path,
    model: str,
    num_images: int,
    tokenizer: Path | None = None,
    assignments: Iterable[str] = (),
    family: str = DEFAULT.model_type,
) -> RunFile:
    """A run file on synthetic data, which is written to a subfolder of `folder` unless it is there already.

    Raises:
        UsageError: the subfolder holds something else, or a key of `assignments` is wrong.
    """
    data = data_folder(folder, family, model, num_images)
    write_sample(data, model=model, tokenizer=tokenizer, family=family, num_images=num_images, sizes="kvasir")
    values = {
        "model": {"path": str(data / "model")},
        "data": {"train": str(data / "train.jsonl")},
        "cache": {"dir": str(folder / "caches")},
        "batch": {"samples_per_step": 96},
        "train": {"learning_rate": 1e-5},
        "output": str(data / "run"),
    }
    path = data / "run.yaml"
    write_text(path, yaml.safe_dump(values, sort_keys=False))  # another process may be reading the same
    return read_run_file(path, assignments)
