"""lookonce: look at each image once, train on it many times.

LoRA fine-tuning of Qwen3-VL on visual question answering. Phase 1 (`lookonce.cache`) runs the frozen vision tower once
over every distinct image; phase 2 (`lookonce.train`) trains the language model from its features.

The names below are the public API. They are imported when first used, so that `lookonce --help` needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from lookonce.version import __version__

if TYPE_CHECKING:
    from lookonce.adapter.save import save_run
    from lookonce.cache.store.reader import VisionCache
    from lookonce.datasets.images import image_key
    from lookonce.datasets.records import Record, Turn, read_records, write_records
    from lookonce.errors import LookonceError
    from lookonce.eval.answerer import Answerer
    from lookonce.eval.decoding.dialogue import Answer
    from lookonce.library import build_cache, load_without_tower, replace_tower
    from lookonce.run.config import RunFile, read_run_file
    from lookonce.train.data.dataset import (
        DataCollatorForPacks,
        DataCollatorForRows,
        PackBatchSampler,
        PackLoader,
        VQADataset,
    )
    from lookonce.train.loop.trainer import PackTrainer
    from lookonce.train.model.load import CachedVisionTower
    from lookonce.train.model.packs import average_gradients, pack_loss, packed_attention

__all__ = [
    "__version__",
    "Answer",
    "Answerer",
    "CachedVisionTower",
    "DataCollatorForPacks",
    "DataCollatorForRows",
    "LookonceError",
    "PackBatchSampler",
    "PackLoader",
    "PackTrainer",
    "Record",
    "RunFile",
    "Turn",
    "VQADataset",
    "VisionCache",
    "average_gradients",
    "build_cache",
    "image_key",
    "load_without_tower",
    "pack_loss",
    "packed_attention",
    "read_records",
    "read_run_file",
    "replace_tower",
    "save_run",
    "write_records",
]
_HOME = {
    "Answer": "lookonce.eval.decoding.dialogue",
    "Answerer": "lookonce.eval.answerer",
    "CachedVisionTower": "lookonce.train.model.load",
    "DataCollatorForPacks": "lookonce.train.data.dataset",
    "DataCollatorForRows": "lookonce.train.data.dataset",
    "PackBatchSampler": "lookonce.train.data.dataset",
    "PackLoader": "lookonce.train.data.dataset",
    "PackTrainer": "lookonce.train.loop.trainer",
    "VQADataset": "lookonce.train.data.dataset",
    "average_gradients": "lookonce.train.model.packs",
    "build_cache": "lookonce.library",
    "load_without_tower": "lookonce.library",
    "pack_loss": "lookonce.train.model.packs",
    "packed_attention": "lookonce.train.model.packs",
    "replace_tower": "lookonce.library",
    "save_run": "lookonce.adapter.save",
    "LookonceError": "lookonce.errors",
    "Record": "lookonce.datasets.records",
    "RunFile": "lookonce.run.config",
    "Turn": "lookonce.datasets.records",
    "VisionCache": "lookonce.cache.store.reader",
    "image_key": "lookonce.datasets.images",
    "read_records": "lookonce.datasets.records",
    "read_run_file": "lookonce.run.config",
    "write_records": "lookonce.datasets.records",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lookonce' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def _keep_our_folder_from_posing_as_hugging_face_datasets() -> None:
    """Block `import datasets` where it would find this repository's folder instead of Hugging Face's library.

    With the repository root on `sys.path` (`python -m ...`) and the library not installed, our `datasets/` is a
    namespace package of that name; transformers then takes the library for installed and Trainer fails on
    `datasets.Dataset`. `None` in `sys.modules` is how Python marks a module as not importable.
    """
    if "datasets" not in sys.modules:
        spec = importlib.util.find_spec("datasets")
        if spec is not None and spec.origin is None:
            sys.modules["datasets"] = None  # type: ignore[assignment]


_keep_our_folder_from_posing_as_hugging_face_datasets()
