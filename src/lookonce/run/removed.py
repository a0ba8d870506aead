"""Keys of the run file that earlier versions had: refused in run files, and replaced or dropped in recorded runs."""

from __future__ import annotations

from typing import Any

from lookonce.errors import UsageError

REMOVED = {
    "train.compare_steps": "compare after training with: lookonce bench step RUN.yaml",
    "train.load_best_model_at_end": "write `train.best: loss` for the checkpoint with the lowest validation loss",
    "train.tensorboard": "list trackers in `train.track`: [tensorboard]",
}
"""Each with its replacement."""


WITHOUT_REPLACEMENT = {"eval.candidates"}
"""Those that nothing replaced: unknown keys in run files, and dropped from recorded runs."""


def refuse_removed_keys(values: dict[str, Any]) -> None:
    """Check that the values of a run file have none of these keys.

    Raises:
        UsageError: one has; names its replacement.
    """
    for name, instead in REMOVED.items():
        section, _, key = name.partition(".")
        if isinstance(values.get(section), dict) and key in values[section]:
            raise UsageError(f"`{name}` no longer exists; remove it and {instead}")


def without_removed_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Recorded values without these keys, so that runs of earlier versions stay readable and mean the same."""
    train = values.get("train")
    if isinstance(train, dict) and train.get("load_best_model_at_end"):
        values = values | {"train": train | {"best": "loss"}}
    removed = REMOVED.keys() | WITHOUT_REPLACEMENT
    sections = {name.partition(".")[0] for name in removed}
    return {
        name: {key: inner for key, inner in value.items() if f"{name}.{key}" not in removed}
        if name in sections and isinstance(value, dict)
        else value
        for name, value in values.items()
    }
