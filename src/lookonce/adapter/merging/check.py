"""What must be true before an adapter is merged: a trained run, its own model, and weights that can be added to.

Design: all of it is checked before anything is written. The model must be the one that the run was trained on, by the
hashes that a training records, so its weights are read once for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lookonce.errors import ModelError, UsageError
from lookonce.files import read_json
from lookonce.run.config import RunFile
from lookonce.run.sections.train import UNQUANTISED

ROUNDED = ("int8", "nf4")
"""The kinds of `train.frozen` whose rounding an adapter has learned to live with."""
FLAG = "--onto-unquantised"


def check_frozen(run: RunFile, command: str, *, allows_unquantised: bool) -> None:
    """Check that the adapter was trained on the weights that it is merged into; `command` is the one that was given.

    Raises:
        UsageError: they were quantised; names the ways.
    """
    frozen = run.train.frozen
    if frozen in ROUNDED and not allows_unquantised:
        raise UsageError(
            f"the adapter was trained on weights quantised to {frozen}, which cannot be stored merged; merged into the "
            f"unquantised ones it gives other answers. To do that and count other answers: {command} {FLAG}\n"
            f"Otherwise load the adapter unmerged, with PEFT, or train again with train.frozen: {UNQUANTISED}"
        )


def check_model(folder: Path) -> None:
    """Check that a model's files are not quantised.

    Raises:
        ModelError: they are; names the ways.
    """
    quantised = _quantisation(read_json(folder / "config.json"))
    if quantised is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ModelError(
            f"{folder} is quantised (quantization_config in config.json: {method}), so nothing can be added to its "
            "weights; train on the unquantised model (model.path), with train.frozen: int8 or nf4 if memory is short, "
            "and merge that run, or load this adapter unmerged, with PEFT or vLLM"
        )


def _quantisation(config: dict[str, Any]) -> Any:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    return next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
