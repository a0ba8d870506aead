"""The whole self-test, two to three minutes on a GPU, and with small sizes some seconds on a CPU.

Design: float32 shows small faults, such as a mask that is off by one token, because its spread is a millionth. The
precision of training shows faults of the kernels that trainings use; it is bfloat16, or float16 on GPUs before Ampere.
Heads have 64 numbers in float32, since larger ones exceed the shared memory of some GPUs, and 128 otherwise. Ways with
dense masks are computed only if no way with FlexAttention is exact, or if they are asked for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lookonce.errors import TrainingError
from lookonce.selftest.attention import Heads, attention_checks, mask_checks
from lookonce.selftest.layouts import Layout, random_layout
from lookonce.selftest.model import ModelSize
from lookonce.selftest.model_checks import ModelChecks
from lookonce.selftest.note import combination
from lookonce.selftest.passes import ieee_float32
from lookonce.selftest.questions import Questions
from lookonce.selftest.report import Check, Report, failed
from lookonce.selftest.ways import ON_CPU, ON_GPU, Way
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
    """The model of each precision."""


def gpu_sizes(half: str = "bf16") -> Sizes:
    """Heads as in real models, images of up to 2,000 tokens, and packs of up to 4,096.

    What takes most memory is the reference of the attention in float64, for packs of 2,560 tokens.
    """
    rng, long = random.Random(0), (2000, (33, 128, 1, 60, 17))
    layouts = Layout((long,)), Layout(((90, (5, 40)), long, (129, (1, 2)))), Layout(((0, (70, 300)),))
    questions = Questions(((5, 6), (12, 10), (40, 50), (16, 20), (4, 4)), (9, 5, 3, 17, 4, 2), 4096, 7)
    models = {"fp32": ModelSize(256, 4, Heads(8, 2, 64)), half: ModelSize(256, 4, Heads(8, 2, 128))}
    return Sizes((*layouts, *(random_layout(rng, 1800) for _ in range(5))), questions, models)


def cpu_sizes() -> Sizes:
    """The same with small heads, images and packs."""
    rng, size = random.Random(0), ModelSize(64, 4, Heads(4, 2, 16))
    questions = Questions(((3, 4), (6, 5), (12, 16), (2, 3)), (7, 4, 3, 2, 2), 512, 6)
    layouts = Layout(((200, (33, 1, 60)), (129, (5,)))), Layout(((0, (70, 20)),)), random_layout(rng, 400)
    return Sizes(layouts, questions, {"fp32": size, "bf16": size})


def run_selftest(dense: bool = False, notify: Notify = print) -> Report:
    """Run the self-test on the best device; `dense` also compares the ways with dense masks.

    Raises:
        TrainingError: the GPU is out of memory.
    """
    start, on_gpu = time.perf_counter(), torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    half = "bf16" if not on_gpu or torch.cuda.get_device_capability() >= AMPERE else "fp16"
    checks: list[Check] = []
    try:
        with ieee_float32():
            for check in compared(gpu_sizes(half) if on_gpu else cpu_sizes(), device, dense, notify):
                checks.append(check)
    except torch.OutOfMemoryError:
        raise TrainingError(
            "the self-test is out of memory; it needs 4 GB of the GPU, which other programs may be using"
        ) from None
    return Report(combination(), tuple(checks), time.perf_counter() - start)


def compared(sizes: Sizes, device: torch.device, dense: bool = False, notify: Notify = print) -> Iterator[Check]:
    """All checks, one after another."""
    found: list[Check] = []
    for check in _attention(sizes, device, notify):
        found.append(check)
        yield check
    models = {}
    for name, size in sizes.models.items():
        notify(f"computing stock rows in {name}")
        models[name] = ModelChecks(size, sizes.questions, PRECISIONS[name], name, device)
    first, second = (ON_GPU[:4], ON_GPU[4:]) if device.type == "cuda" else (ON_CPU, ())
    for check in _models(models, first, notify):
        found.append(check)
        yield check
    if dense or not Report({}, tuple(found), 0).exact:
        yield from _models(models, second, notify)


def _attention(sizes: Sizes, device: torch.device, notify: Notify) -> Iterator[Check]:
    notify("comparing masks and attention")
    yield from mask_checks(sizes.layouts, device)
    for name, size in sizes.models.items():
        try:
            yield from attention_checks(sizes.layouts, size.heads, PRECISIONS[name], name, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or a kernel raises
            yield failed(f"attention, {name}", error)


def _models(models: dict[str, ModelChecks], ways: Sequence[Way], notify: Notify) -> Iterator[Check]:
    for way in ways:
        for name, checks in models.items():
            notify(f"comparing packs in {name}: {way.name}")
            yield from checks.checks(way)
