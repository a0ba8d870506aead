"""The whole self-test, about a minute on a GPU, and with small sizes some seconds on a CPU.

Design: most of the time is compilation, so each kernel is compiled only in the precision in which trainings use it:
bfloat16, or float16 on GPUs before Ampere. float32 shows small faults, such as a mask that is off by one token, because
its spread is a millionth; such faults are those of the code around the kernels, so its layers are not compiled. Heads
have 64 numbers in float32, since larger ones exceed the shared memory of some GPUs, and 128 otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from lookonce.environment import best_device
from lookonce.errors import TrainingError
from lookonce.selftest.attention import Heads
from lookonce.selftest.model import ModelChecks, ModelSize, Questions, ieee_float32
from lookonce.selftest.report import ON_CPU, ON_GPU, Check, Report, Variant, combination
from lookonce.text import Notify
from lookonce.train.model.load import PRECISIONS

AMPERE = (8, 0)
"""CUDA capability of the first GPUs with bfloat16."""
Sizes = tuple[Questions, Mapping[str, ModelSize]]
"""How much is compared: the questions, and the model in float32 and then, unless that is float32, as it is trained."""


def gpu_sizes(precision: str = "bf16") -> Sizes:
    """Heads as in real models, images of up to 2,000 tokens, and packs of up to 4,096.

    What takes most memory is the reference of the attention in float64, for a pack of 2,560 tokens.
    """
    questions = Questions(((5, 6), (12, 10), (40, 50), (16, 20), (4, 4)), (9, 5, 3, 17, 4, 2), 4096, 7)
    models = {"fp32": ModelSize(256, 4, Heads(8, 2, 64))}
    models.setdefault(precision, ModelSize(256, 4, Heads(8, 2, 128)))
    return questions, models


def cpu_sizes() -> Sizes:
    """The same with small heads, images and packs."""
    size = ModelSize(64, 4, Heads(4, 2, 16))
    return Questions(((3, 4), (6, 5), (12, 16), (2, 3)), (7, 4, 3, 2, 2), 512, 6), {"fp32": size, "bf16": size}


def run_selftest(notify: Notify = print) -> Report:
    """Run the self-test on the best device, in the best precision that it has.

    Raises:
        TrainingError: the GPU is out of memory.
    """
    start, on_gpu = time.perf_counter(), torch.cuda.is_available()
    precision = default_precision()
    try:
        with ieee_float32():
            checks = compared(gpu_sizes(precision) if on_gpu else cpu_sizes(), ON_GPU if on_gpu else ON_CPU, notify)
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the self-test is out of memory; it needs 4 GB of the GPU, which other programs may be using"
        ) from None
    return Report(combination(precision), tuple(checks), time.perf_counter() - start)


def default_precision() -> str:
    """bf16, or fp16 on a GPU without it."""
    has_bf16 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= AMPERE
    return "bf16" if has_bf16 else "fp16"


def compared(sizes: Sizes, variants: Sequence[Variant], notify: Notify) -> list[Check]:
    """The checks of masks, attention and variants; in float32, of those variants that are not compiled, as parts."""
    checks: list[Check] = []
    questions, models = sizes
    for precision, size in models.items():
        is_part = precision != [*models][-1]
        notify(f"computing stock rows in {precision}")
        packs = ModelChecks(size, questions, PRECISIONS[precision], precision, best_device())
        notify("comparing masks and attention")
        checks += packs.attention() if checks else [*packs.masks(), *packs.attention()]
        for variant in variants:
            if not (is_part and variant.compiled):
                notify(f"comparing packs in {precision}: {variant.name}")
                checks += [replace(check, is_part=is_part) for check in packs.checks(variant)]
    return checks
