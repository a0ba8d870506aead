"""What `train.frozen` names: how the frozen weights of the language model are loaded, and what this needs.

Design: a kind of frozen weights gives arguments of `from_pretrained`, does what is left to do with a model that was
loaded with them, and checks its shapes. `load` knows nothing else of it. The libraries that a kind needs are imported
when it is used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.run.sections.train import UNQUANTISED

FP8_CAPABILITY = (8, 9)
"""CUDA's compute capability of the first GPUs that multiply in fp8."""
EXTRAS = {"int8": ("bitsandbytes", "qlora"), "nf4": ("bitsandbytes", "qlora")}
"""The package that a kind of frozen weights needs, and the extra of lookonce that installs it."""


class Quantised(Protocol):
    """A kind of frozen weights."""

    def loading_options(self, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of `from_pretrained`; products are computed in `dtype`."""
        ...

    def finish(self, model: Any) -> None:
        """Do what is left to do with a model that was loaded with these arguments."""
        ...

    def mismatched(self, model: Any) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
        """The quantised tensors of a loaded model that had other shapes in its files: name, shape there, shape here."""
        ...


def quantised(frozen: str) -> Quantised | None:
    """The kind of frozen weights that a value of `train.frozen` names; None for those that are not quantised.

    Raises:
        UsageError: what it needs is not installed.
    """
    check_frozen(frozen)
    if frozen == UNQUANTISED:
        return None
    if frozen == "fp8":
        from lookonce.train.model.frozen.fp8 import Fp8

        return Fp8()
    from lookonce.train.model.frozen.bnb import BitsAndBytes

    return BitsAndBytes(frozen)


def check_frozen(frozen: str, key: str = "frozen") -> None:
    """Check that what a value of a run file's `key` needs is here.

    Raises:
        UsageError: a package is not installed, or the GPU cannot multiply in fp8; says what to do.
    """
    if frozen == "fp8" and torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        raise UsageError(
            f"{key}: fp8 needs a GPU that multiplies in fp8 (Ada, Hopper or later), and "
            f"{torch.cuda.get_device_name()} cannot; set {key}: {UNQUANTISED}, int8 or nf4"
        )
    package, extra = EXTRAS.get(frozen, ("", ""))
    if package and importlib.util.find_spec(package) is None:
        raise UsageError(
            f"{key}: {frozen} needs {package}, which is not installed; install it with: "
            f"pip install 'lookonce[{extra}]', or set {key}: {UNQUANTISED}"
        )


def check_run(run: RunFile) -> None:
    """Check what a run needs for its training and for its answers.

    Raises:
        UsageError: see `check_frozen`.
    """
    check_frozen(run.train.frozen, "train.frozen")
    check_frozen(frozen_of_answers(run), "eval.frozen")


def frozen_of_answers(run: RunFile) -> str:
    """How the frozen weights are kept when answers are computed after training."""
    return run.eval.frozen or (UNQUANTISED if run.train.frozen == "fp8" else run.train.frozen)


def model_settings(run: RunFile) -> list[str]:
    """The settings on which the numbers of a loaded model depend, for hashes of what answers depend on."""
    frozen = frozen_of_answers(run)
    return [run.train.precision, run.model.attention, *([] if frozen == UNQUANTISED else [frozen])]
