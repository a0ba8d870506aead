"""The whole self-test, about a minute on a GPU, and with small sizes some seconds on a CPU.

Design: most of the time is compilation, so each kernel is compiled only in the precision in which trainings use it:
bfloat16, or float16 on GPUs before Ampere. float32 shows small faults, such as a mask that is off by one token, because
its spread is a millionth; such faults are those of the code around the kernels, so its layers are not compiled. Heads
have 64 numbers in float32, since larger ones exceed the shared memory of some GPUs, and 128 otherwise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lookonce.errors import TrainingError
from lookonce.selftest.attention import Heads, Layout, Lengths, attention_checks, mask_checks, random_layout
from lookonce.selftest.model import ModelChecks, ModelSize, Questions, ieee_float32
from lookonce.selftest.report import ON_CPU, ON_GPU, Check, Report, Variant, combination, failed
from lookonce.text import Notify
from lookonce.train.model.load import PRECISIONS

AMPERE = (8, 0)
"""CUDA capability of the first GPUs with bfloat16."""


@dataclass(frozen=True)
class Sizes:
    """How much is compared."""

    layouts: tuple[Layout, ...]
    questions: Questions
    models: dict[str, ModelSize]
    """The model in float32, and in the precision of training unless that is float32 too."""

    @property
    def precision(self) -> str:
        """The precision of training."""
        return [*self.models][-1]


def gpu_sizes(precision: str = "bf16") -> Sizes:
    """Heads as in real models, images of up to 2,000 tokens, and packs of up to 4,096.

    What takes most memory is the reference of the attention in float64, for packs of 2,560 tokens.
    """
    rng, long = random.Random(0), Lengths(2000, (33, 128, 1, 60, 17))
    around = Lengths(90, (5, 40)), long, Lengths(129, (1, 2))
    layouts = Layout((long,)), Layout(around), Layout((Lengths(0, (70, 300)),))
    questions = Questions(((5, 6), (12, 10), (40, 50), (16, 20), (4, 4)), (9, 5, 3, 17, 4, 2), 4096, 7)
    models = {"fp32": ModelSize(256, 4, Heads(8, 2, 64))}
    models.setdefault(precision, ModelSize(256, 4, Heads(8, 2, 128)))
    return Sizes((*layouts, *(random_layout(rng, 1800) for _ in range(5))), questions, models)


def cpu_sizes() -> Sizes:
    """The same with small heads, images and packs."""
    rng, size = random.Random(0), ModelSize(64, 4, Heads(4, 2, 16))
    questions = Questions(((3, 4), (6, 5), (12, 16), (2, 3)), (7, 4, 3, 2, 2), 512, 6)
    two = Lengths(200, (33, 20, 60), (0, 9, 19)), Lengths(129, (5,))
    layouts = Layout(two), Layout((Lengths(0, (70, 20)),)), random_layout(rng, 400)
    return Sizes(layouts, questions, {"fp32": size, "bf16": size})


def run_selftest(notify: Notify = print) -> Report:
    """Run the self-test on the best device, in the best precision that it has.

    Raises:
        TrainingError: the GPU is out of memory.
    """
    start, on_gpu = time.perf_counter(), torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    precision = default_precision()
    comparison = Comparison(gpu_sizes(precision) if on_gpu else cpu_sizes(), device, notify)
    try:
        with ieee_float32():
            checks = comparison.run(ON_GPU if on_gpu else ON_CPU)
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the self-test is out of memory; it needs 4 GB of the GPU, which other programs may be using"
        ) from None
    return Report(combination(precision), tuple(checks), time.perf_counter() - start)


def default_precision() -> str:
    """bf16, or fp16 on a GPU without it."""
    has_bf16 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= AMPERE
    return "bf16" if has_bf16 else "fp16"


class Comparison:
    """The checks of one self-test; the stock rows of each precision are computed once."""

    def __init__(self, sizes: Sizes, device: torch.device, notify: Notify = print) -> None:
        self.sizes, self.device, self.notify = sizes, device, notify
        self.checks: list[Check] = []
        self._models: dict[str, ModelChecks] = {}
        self._compared: set[tuple[str, Variant]] = set()

    def run(self, variants: Sequence[Variant]) -> list[Check]:
        """Compare masks, attention and variants."""
        self._attention()
        for variant in variants:
            self._compare(variant)
        return self.checks

    def _attention(self) -> None:
        self.notify("comparing masks and attention")
        self.checks += mask_checks(self.sizes.layouts, self.device)
        for name, size in self.sizes.models.items():
            try:
                self.checks += attention_checks(self.sizes.layouts, size.heads, PRECISIONS[name], name, self.device)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler or a kernel raises
                self.checks.append(failed(f"attention, {name}", error))

    def _compare(self, variant: Variant) -> None:
        """Compare a variant in the precision of training, and before that its part in float32, each once."""
        if self.sizes.precision != "fp32":
            part = replace(variant, compiled=False)
            self.checks += [replace(check, is_part=True) for check in self._model_checks("fp32", part)]
        self.checks += self._model_checks(self.sizes.precision, variant)

    def _model_checks(self, precision: str, variant: Variant) -> list[Check]:
        """Compare packs of the small model in one precision; none if they were."""
        if (precision, variant) in self._compared:
            return []
        self._compared.add((precision, variant))
        if precision not in self._models:
            self.notify(f"computing stock rows in {precision}")
            size, questions = self.sizes.models[precision], self.sizes.questions
            self._models[precision] = ModelChecks(size, questions, PRECISIONS[precision], precision, self.device)
        self.notify(f"comparing packs in {precision}: {variant.name}")
        return self._models[precision].checks(variant)
