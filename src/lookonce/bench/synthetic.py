"""Synthetic data for measurements: frames with the sizes and questions of Kvasir-VQA's, and a model of real size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

from lookonce.datasets.sample.scene import KVASIR_SIZES
from lookonce.datasets.sample.write import write_sample
from lookonce.families.lookup import DEFAULT
from lookonce.files import write_text
from lookonce.run.config import RunFile, read_run_file


def data_folder(folder: Path, family: str, model: str, num_images: int) -> Path:
    """The subfolder for a model and this many images."""
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
    write_sample(data, model=model, tokenizer=tokenizer, family=family, num_images=num_images, sizes=KVASIR_SIZES)
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
