"""Made-up data to measure on: frames with the sizes and questions of Kvasir-VQA's, and a model of real size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from lookonce.datasets.sample.sizes import KVASIR_SIZES
from lookonce.datasets.sample.write import write_sample
from lookonce.run.config import RunFile, read_run_file


def make_run(
    place: Path, model: str, num_images: int, tokenizer: Path | None = None, assignments: Iterable[str] = ()
) -> RunFile:
    """A run file on such data, which is written to a folder in `place` if it is not there yet.

    Raises:
        UsageError: that folder holds something else, or a key of `assignments` is wrong.
    """
    folder = place / f"{model}-{num_images}"
    write_sample(folder, model=model, tokenizer=tokenizer, num_images=num_images, sizes=KVASIR_SIZES)
    values = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "cache": {"dir": str(place / "caches")},
        "batch": {"samples_per_step": 96},
        "train": {"learning_rate": 1e-5},
        "output": str(folder / "run"),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return read_run_file(path, assignments)
