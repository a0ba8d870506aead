"""What many tests need: the sample, a run file on it, its cache; and real data where there is some."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.sample.write import write_sample
from lookonce.run.config import RunFile
from lookonce.run.inputs import Inputs

ROOT = Path(__file__).parents[1]
REAL_DATA = Path(os.environ.get("LOOKONCE_REAL_DATA", ROOT.parent / "shared"))
"""Holds kvasir-vqa/ (records and images) and qwen3-vl-processor/ (the published tokenizer)."""

MakeRun = Callable[..., RunFile]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample set and its tiny model; not to be written to."""
    folder = tmp_path_factory.mktemp("sample") / "sample"
    write_sample(folder)
    return folder


@pytest.fixture
def make_run(sample: Path, tmp_path: Path) -> MakeRun:
    """Makes run files on the sample with cache and output in the test's own folder.

    `make_run(train={"epochs": 1}, output="b")` replaces single keys of a section, and whole values.
    """

    def make(**changes: Any) -> RunFile:
        values: dict[str, Any] = {
            "model": {"path": str(sample / "model")},
            "data": {split: str(sample / f"{split}.jsonl") for split in ("train", "val", "test")},
            "cache": {"dir": str(tmp_path / "caches"), "dtype": "float32", "shard_mb": 1},
            "lora": {"rank": 4, "alpha": 8},
            "batch": {"samples_per_step": 8, "samples_per_forward": 8},
            "train": {"steps": 4, "precision": "fp32", "logging_steps": 1, "seed": 0},
            "eval": {"max_new_tokens": 4},
            "output": str(tmp_path / "run"),
        }
        for name, change in changes.items():
            values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
        return RunFile.model_validate(values)

    return make


@pytest.fixture(scope="session")
def built(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> VisionCache:
    """The sample's cache in float32; not to be written to."""
    values = {
        "model": {"path": str(sample / "model")},
        "data": {split: str(sample / f"{split}.jsonl") for split in ("train", "val", "test")},
        "cache": {"dir": str(tmp_path_factory.mktemp("caches")), "dtype": "float32", "shard_mb": 1},
        "output": "unused",
    }
    inputs = Inputs.open(RunFile.model_validate(values))
    inputs.build()
    return inputs.open_cache()


@pytest.fixture(scope="session")
def real_records() -> Path:
    """Eight real frames and 56 questions: `real8.jsonl` beside `images/`."""
    return _real("kvasir-vqa/real8.jsonl")


@pytest.fixture(scope="session")
def real_processor() -> Path:
    """The published tokenizer, chat template and image processor settings of Qwen3-VL."""
    return _real("qwen3-vl-processor/tokenizer_config.json").parent


def _real(name: str) -> Path:
    path = REAL_DATA / name
    if not path.exists():
        pytest.skip(f"no {name} in {REAL_DATA} (LOOKONCE_REAL_DATA names the folder of the real data)")
    return path


@pytest.fixture
def stock_processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Qwen3VLProcessor]:
    """Loads transformers' own processor of a model folder.

    It insists on a video processor, which needs torchvision; no video is shown here, so none is given.
    """
    monkeypatch.setattr(Qwen3VLProcessor, "check_argument_for_proper_class", lambda self, name, value: type(value))

    def load(folder: Path) -> Qwen3VLProcessor:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        return Qwen3VLProcessor(images, tokenizer, None, chat_template=tokenizer.chat_template)

    return load
