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

from lookonce.version import __version__ as __version__

if TYPE_CHECKING:
    from lookonce.adapter.save import save_run as save_run
    from lookonce.cache.store.reader import VisionCache as VisionCache
    from lookonce.datasets.images import image_key as image_key
    from lookonce.datasets.records import Record as Record
    from lookonce.datasets.records import Turn as Turn
    from lookonce.datasets.records import read_records as read_records
    from lookonce.datasets.records import write_records as write_records
    from lookonce.errors import LookonceError as LookonceError
    from lookonce.eval.answerer import Answerer as Answerer
    from lookonce.eval.decoding.dialogue import Answer as Answer
    from lookonce.library import build_cache as build_cache
    from lookonce.library import load_without_tower as load_without_tower
    from lookonce.library import replace_tower as replace_tower
    from lookonce.run.config import RunFile as RunFile
    from lookonce.run.config import read_run_file as read_run_file
    from lookonce.train.data.dataset import DataCollatorForPacks as DataCollatorForPacks
    from lookonce.train.data.dataset import DataCollatorForRows as DataCollatorForRows
    from lookonce.train.data.dataset import PackBatchSampler as PackBatchSampler
    from lookonce.train.data.dataset import PackLoader as PackLoader
    from lookonce.train.data.dataset import VQADataset as VQADataset
    from lookonce.train.loop.trainer import PackTrainer as PackTrainer
    from lookonce.train.model.load import CachedVisionTower as CachedVisionTower
    from lookonce.train.model.packs import average_gradients as average_gradients
    from lookonce.train.model.packs import pack_loss as pack_loss
    from lookonce.train.model.packs import packed_attention as packed_attention

_NAMES = {
    "adapter.save": "save_run",
    "cache.store.reader": "VisionCache",
    "datasets.images": "image_key",
    "datasets.records": "Record Turn read_records write_records",
    "errors": "LookonceError",
    "eval.answerer": "Answerer",
    "eval.decoding.dialogue": "Answer",
    "library": "build_cache load_without_tower replace_tower",
    "run.config": "RunFile read_run_file",
    "train.data.dataset": "DataCollatorForPacks DataCollatorForRows PackBatchSampler PackLoader VQADataset",
    "train.loop.trainer": "PackTrainer",
    "train.model.load": "CachedVisionTower",
    "train.model.packs": "average_gradients pack_loss packed_attention",
}
"""The names in each module."""
__all__ = sorted(["__version__", *" ".join(_NAMES.values()).split()])


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"lookonce.{module}"), name)
    raise AttributeError(f"module 'lookonce' has no attribute {name!r}")


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
