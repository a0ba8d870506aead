"""Fixtures of all tests: the sample dataset, run files on it, its cache, and real data if it is available."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image
from transformers import AutoTokenizer, PreTrainedConfig, ProcessorMixin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.reader import VisionCache
from lookonce.checks.inputs import check_model
from lookonce.datasets import images
from lookonce.datasets.sample.write import write_sample
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from support.saved_cache import SavedCache

ROOT = Path(__file__).parents[2]
REAL_DATA = Path(os.environ.get("LOOKONCE_REAL_DATA", ROOT.parent / "shared"))
"""The folder of kvasir-vqa/ (records and images) and qwen3-vl-processor/ (the published tokenizer)."""

MakeRun = Callable[..., RunFile]

towers: dict[tuple[object, ...], Tower] = {}
"""Those that `one_tower` has loaded."""

# transformers formats each configuration that it loads for a message that is not shown, which takes most of the time.
PreTrainedConfig.__repr__ = object.__repr__


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the processes of `pytest --numprocesses` make once for all of them."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


@contextlib.contextmanager
def made_once(place: Path) -> Iterator[None]:
    """Runs the block in one process at a time. The first makes what is at a place; the others find it."""
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def sample(common: Path) -> Path:
    """The sample dataset and its tiny model. Tests must not write to it."""
    with made_once(common / "sample"):
        write_sample(common / "sample")
    return common / "sample"


@pytest.fixture(scope="module")
def sample_model(sample: Path) -> ModelFolder:
    """The sample's model, whose weights are not loaded."""
    return ModelFolder.open(str(sample / "model"))


@pytest.fixture
def model(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample's model that tests may change."""
    return Path(shutil.copytree(sample / "model", tmp_path / "model"))


@pytest.fixture(scope="session")
def make_run_in(sample: Path) -> MakeRun:
    """Makes run files on the sample, with cache and output in a given folder.

    `make_run_in(folder, train={"epochs": 1}, output="b")` replaces single keys of a section, or a whole value.
    """

    def make(folder: Path, **changes: Any) -> RunFile:
        values: dict[str, Any] = {
            "model": {"path": str(sample / "model")},
            "data": {split: str(sample / f"{split}.jsonl") for split in ("train", "val", "test")},
            "cache": {"dir": str(folder / "caches"), "dtype": "float32", "shard_mb": 1},
            "lora": {"rank": 4, "alpha": 8},
            "batch": {"samples_per_step": 8, "samples_per_forward": 8},
            "train": {"steps": 4, "precision": "fp32", "logging_steps": 1, "seed": 0},
            "eval": {"max_new_tokens": 4},
            "output": str(folder / "run"),
        }
        for name, change in changes.items():
            values[name] = values.get(name, {}) | change if isinstance(change, dict) else change
        return RunFile.model_validate(values)

    return make


@pytest.fixture
def make_run(make_run_in: MakeRun, tmp_path: Path) -> MakeRun:
    """`make_run_in` the test's own folder."""
    return partial(make_run_in, tmp_path)


@pytest.fixture(scope="session")
def built(make_run_in: MakeRun, common: Path) -> VisionCache:
    """The sample's cache in float32. Tests must not write to it."""
    inputs = open_run(make_run_in(common / "built"), TO_BUILD)
    with made_once(common / "built"):
        inputs.build()
    return inputs.open_cache()


@pytest.fixture
def make_cached_run(make_run: MakeRun, built: VisionCache) -> MakeRun:
    """`make_run` with the sample's cache, for tests that would otherwise build the same."""
    return partial(make_run, cache={"dir": str(built.folder.parent)})


@pytest.fixture(scope="module")
def one_tower(sample: Path) -> Iterator[None]:
    """Loads the tower of the sample's model once for each dtype: it takes longer than to encode a few images."""
    load_tower = OpenRun.load_tower

    def load_once(inputs: OpenRun, **options: Any) -> Tower:
        kind = (inputs.model_folder.folder, inputs.fingerprint.dtype, *options.items())
        if inputs.model_folder.folder != sample / "model":
            return load_tower(inputs, **options)
        if kind not in towers:
            towers[kind] = load_tower(inputs, **options)
        return towers[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenRun, "load_tower", load_once)
        yield


@pytest.fixture(scope="module")
def one_model_check(sample: Path) -> Iterator[None]:
    """The sample's model is checked once for each of the settings that count; that is most of the time of a check."""
    results: dict[str, Any] = {}

    def check_once(run: RunFile) -> Any:
        cache = run.cache.model_dump(include={"backend", "min_pixels", "max_pixels"})
        sections = (run.model, run.data.enable_thinking, run.lora, run.batch.mode, run.eval.engine, run.train.seed)
        settings = str((cache, *sections))
        if run.model.path != str(sample / "model") or settings not in results:
            results[settings] = check_model(run)
        return results[settings]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lookonce.checks.inputs.check_model", check_once)
        yield


@pytest.fixture(scope="session")
def copy_built(built: VisionCache, sample: Path) -> Callable[[Path, Path], None]:
    """Copies the sample's cache into a folder of caches, for the images of a copy of the sample."""
    saved = SavedCache.of(built.folder, sample)
    return lambda caches, copy: saved.write(caches / built.folder.name, copy, built.fingerprint.sha256)


@pytest.fixture
def backdate() -> Callable[[Path, float], None]:
    """Makes a file look as if it was touched some seconds ago."""

    def backdate(path: Path, seconds: float) -> None:
        touched = path.stat().st_mtime - seconds
        os.utime(path, (touched, touched))

    return backdate


@pytest.fixture
def files_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were just written have stamps that are trusted; no program can set the time of a status change."""
    monkeypatch.setattr(images, "now", lambda: time.time() + 10)


@pytest.fixture(scope="session")
def real_records() -> Path:
    """Records of eight real frames with 56 questions; the frames are in `images/` beside the file."""
    return _real("kvasir-vqa/real8.jsonl")


@pytest.fixture(scope="session")
def real_rows() -> Path:
    """The real validation rows of Kvasir-VQA as they were published, without images."""
    return _real("kvasir-vqa/val.jsonl")


@pytest.fixture(scope="session")
def real_processor() -> Path:
    """A folder with the published tokenizer, chat template and image processor settings of Qwen3-VL."""
    return _real("qwen3-vl-processor/tokenizer_config.json").parent


def _real(name: str) -> Path:
    path = REAL_DATA / name
    if not path.exists():
        pytest.skip(f"no {name} in {REAL_DATA}; set LOOKONCE_REAL_DATA to the folder of the real data")
    return path


@pytest.fixture
def stock_processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Loads transformers' own processor from a model folder, that of the model's family."""
    return lambda folder: load_stock_processor(folder, monkeypatch)


def load_stock_processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own processor.

    It requires a video processor, which needs torchvision. No test shows a video, so it gets none.
    """
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda self, name, value: type(value))
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor_class = getattr(transformers, settings.get("processor_class", "Qwen3VLProcessor"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return processor_class(images, tokenizer, None, chat_template=tokenizer.chat_template)


def stock_answer(model: Any, processor: Any, line: dict[str, Any], max_new_tokens: int) -> str:
    """transformers' own answer to the question of a line of a predictions file."""
    content = [{"type": "image"}, {"type": "text", "text": line["question"]}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    with Image.open(*line["images"]) as image:
        inputs = processor(text=[text], images=[image.convert("RGB")], return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    answer: str = processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer
