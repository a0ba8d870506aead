"""Settings that need something: a schedule, an optimizer, a package, a GPU, a split with records."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

from lookonce.checks.report import Result
from lookonce.environment import LAUNCH, MPI, gpu_gb, launch_note
from lookonce.errors import LookonceError
from lookonce.run.config import RunFile
from lookonce.run.sections.train import UNQUANTISED

PACKAGES = {
    "bnb": "bitsandbytes",
    "8bit": "bitsandbytes",
    "torchao": "torchao",
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "grokadamw": "grokadamw",
    "schedule_free": "schedulefree",
    "stable_adamw": "optimi",
    "anyprecision": "torchdistx",
}
"""Parts of optimizer names of transformers, and the package that each needs."""
PLAIN_TRAINING = {
    "scheduler": "constant",
    "scheduler_args": {},
    "track": [],
    "precision": "bf16",
    "frozen": UNQUANTISED,
}
"""Settings of `train` that are checked one by one, set to what always works."""


def check_settings(run: RunFile) -> list[Result]:
    """Errors and warnings about settings that the schema allows."""
    wrong = [*_launch(), *_packages(run), *_training(run), *_hardware(run)]
    options = run.train
    usual = f"{options.optimizer}, {options.scheduler}, {run.batch.samples_per_step} samples a step"
    return [*(wrong or [Result("ok", "training", usual)]), *_splits(run)]


def _launch() -> Iterator[Result]:
    try:
        if note := launch_note():
            yield Result("warning", "environment", note)
    except LookonceError as error:
        yield Result("error", "environment", str(error))


@contextlib.contextmanager
def _as_one_process() -> Iterator[None]:
    """Libraries do not join a process group within the block: a check would wait for the other processes."""
    hidden = {name: os.environ.pop(name) for name in (*LAUNCH, *MPI) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _packages(run: RunFile) -> Iterator[Result]:
    needed = {
        package: f"train.optimizer: {run.train.optimizer}"
        for part, package in PACKAGES.items()
        if part in run.train.optimizer
    }
    if run.model.attention == "flash_attention_2":
        needed["flash_attn"] = "model.attention: flash_attention_2"
    if run.cache.backend == "torchvision":
        needed["torchvision"] = "cache.backend: torchvision"
    for package, setting in needed.items():
        if importlib.util.find_spec(package) is None:
            yield Result("error", "packages", f"{setting} needs the package {package}", "install it, or change the key")


def _training(run: RunFile) -> Iterator[Result]:
    from lookonce.train.loop.arguments import check_scheduler, training_arguments
    from lookonce.train.loop.trackers import check_trackers
    from lookonce.train.model.frozen import check_run

    sections = {
        "train": run.train.model_copy(update=PLAIN_TRAINING),
        "eval": run.eval.model_copy(update={"frozen": None}),
    }
    plain = run.model_copy(update=sections)
    checks: tuple[Callable[[], Any], ...] = (
        lambda: check_scheduler(run.train),
        lambda: check_trackers(run.train.track),
        lambda: check_run(run),
        lambda: training_arguments(plain, run.output),
    )
    for check in checks:
        try:
            with _as_one_process():
                check()
        except LookonceError as error:
            yield Result("error", "training", str(error), "correct the section `train`")


def _hardware(run: RunFile) -> Iterator[Result]:
    if run.train.precision == "fp16" and gpu_gb() is None:
        yield Result("warning", "training", "train.precision: fp16 needs a GPU, and this machine has none", "use bf16")


def _splits(run: RunFile) -> Iterator[Result]:
    split = run.eval.split
    if not getattr(run.data, split):
        yield Result(
            "warning",
            "evaluation",
            f"eval.split is {split}, and data.{split} names no records: nothing is evaluated",
            f"set data.{split}, or eval.split",
        )
