"""Synthetic data for measurements: frames with the sizes and questions of Kvasir-VQA's, and a model of real size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from lookonce.datasets.sample.sizes import KVASIR_SIZES
from lookonce.datasets.sample.write import write_sample
from lookonce.run.config import RunFile, read_run_file


def make_run(
    folder: Path, model: str, num_images: int, tokenizer: Path | None = None, assignments: Iterable[str] = ()
) -> RunFile:
    """A run file on synthetic data, which is written to a subfolder of `folder` unless it is there already.

    Raises:
        UsageError: the subfolder holds something else, or a key of `assignments` is wrong.
    """
    data = folder / f"{model}-{num_images}"
    write_sample(data, model=model, tokenizer=tokenizer, num_images=num_images, sizes=KVASIR_SIZES)
    values = {
        "model": {"path": str(data / "model")},
        "data": {"train": str(data / "train.jsonl")},
        "cache": {"dir": str(folder / "caches")},
        "batch": {"samples_per_step": 96},
        "train": {"learning_rate": 1e-5},
        "output": str(data / "run"),
    }
    path = data / "run.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return read_run_file(path, assignments)
