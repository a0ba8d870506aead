"""The pieces for a training script of one's own: a cache, a model without its tower, a dataset, batches of rows.

Design: each piece is what a library for training expects of its kind: a model of transformers, a dataset by index, a
function that makes a batch of examples. So Trainer, accelerate or a loop by hand use them without knowing of a cache.
They need no run file, and are the same code that `lookonce train` uses. A batch of rows is one for the stock model,
whose own loss counts; the features of its images are in the place of their pixels.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image, ImageOps

from lookonce.cache.build.worker import BuildOptions
from lookonce.cache.build.worker import build_cache as build
from lookonce.cache.format import Backend, DtypeName
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Source
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.datasets.formats.image_references import Finder
from lookonce.datasets.formats.registry import Reader
from lookonce.datasets.images import bytes_key, image_key, index_images
from lookonce.datasets.records import Record, Turn
from lookonce.environment import best_device, device_name
from lookonce.errors import FeaturesMissing, ImageError, UsageError
from lookonce.families.lookup import family_of, family_of_tower
from lookonce.hub import locate
from lookonce.run.open import open_model
from lookonce.text import shown
from lookonce.train.data.batches import Batch, CachedFeatures, RowCollator, StockCollator
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model import load

Keys = tuple[str, ...]
Shown = Path | str | bytes | Image.Image | Mapping[str, Any]
"""An image: the path of a file, the bytes of one, an image of Pillow, or a row of a column of images of the library
`datasets` that is not decoded."""


def build_cache(
    images: Iterable[Shown],
    model: Path | str,
    folder: Path | str,
    *,
    revision: str | None = None,
    dtype: DtypeName = "bfloat16",
    backend: Backend = "pil",
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    shard_mb: int = 2048,
) -> VisionCache:
    """The cache of some images, which are encoded by a model's vision tower; what it has is not encoded again.

    `images` are paths, bytes of files, images of Pillow, or a column of `datasets`. `model` is a folder or a name on
    the Hub, `folder` that of all caches, in which each model and each setting has its own. The options are keys of the
    section `cache` of a run file. It may be interrupted, and called by several processes at once.

    Raises:
        ModelError: there is no such model, or it is not of a supported family.
        ImageError: an image cannot be read or encoded; the others are in the cache.
        DiskFull: there is no room; what is encoded stays.
    """
    settings = {"backend": backend, "min_pixels": min_pixels, "max_pixels": max_pixels, "dtype": dtype}
    source, root = Source.of(locate(str(model), revision), settings), Path(folder)
    model_folder, processor, fingerprint = open_model(source)
    provenance = {"model": str(model), "revision": revision, "device": device_name()}
    with TemporaryDirectory(prefix="lookonce-") as temporary:
        paths = [*_files(images, Path(temporary))]
        index = index_images((Record((path,), (Turn("", ""),), origin=str(path)) for path in paths), needs_one=False)
        tower = lambda: Tower(model_folder, fingerprint.storage.compute, best_device())  # noqa: E731
        options = BuildOptions(shard_mb * 1_000_000, provenance)
        report = build(root, fingerprint, processor, index, tower, options)
    source.write_note(root, fingerprint)
    failed = {**{str(path): reason for path, reason in index.unusable.items()}, **report.quarantined}
    if failed:
        name, reason = next(iter(failed.items()))
        raise ImageError(f"{len(failed)} of {len(paths)} images cannot be encoded; the first is {name}: {reason}")
    return find_cache(root, fingerprint)


def _files(images: Iterable[Shown], folder: Path) -> Iterator[Path]:
    """The file of each image; those that have none are written to `folder`."""
    for number, image in enumerate(images):
        if isinstance(image, Path | str):
            yield Path(image)
        else:
            path = folder / f"{number}.image"
            path.write_bytes(_bytes_of(image))
            yield path


def _bytes_of(image: Shown) -> bytes:
    """The bytes of an image that has no file of its own; those of a file that a row of `datasets` names."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Image.Image):
        return _png(image)
    if isinstance(image, Mapping) and (data := image.get("bytes")):
        return bytes(data)
    if isinstance(image, Mapping) and (path := image.get("path")):
        return Path(path).read_bytes()
    raise UsageError(
        f"{shown(repr(image))} is not an image; expected a path, the bytes of a file, an image of Pillow, or a row "
        "{'bytes': ..., 'path': ...} of an image column of `datasets`"
    )


def _png(image: Image.Image) -> bytes:
    """An image of Pillow as the file that stands for it: RGB, as transformers reads images."""
    data = io.BytesIO()
    ImageOps.exif_transpose(image).convert("RGB").save(data, "PNG", compress_level=0)
    return data.getvalue()


def key_of(image: Shown) -> str:
    """The key of an image in caches: the sha256 of the bytes of its file.

    Raises:
        ImageError: there is no such file.
    """
    return image_key(Path(image)) if isinstance(image, Path | str) else bytes_key(_bytes_of(image))


def load_without_tower(
    model: Path | str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    attention: str = "sdpa",
) -> Any:
    """transformers' model of a folder or of the Hub, with cached features in the place of its vision tower, frozen.

    It is an instance of its stock class, on the GPU if there is one; the tower's weights are never read. `pixel_values`
    `[num_tokens, num_levels, hidden]` are features, as `VisionCache` has them, of all images of a batch one after
    another; `image_grid_thw` are their grids.

    Raises:
        ModelError: there is no such model, it is not of a supported family, or tensors of it are missing.
    """
    folder = ModelFolder.open(str(locate(str(model), revision)))
    return load.load_without_tower(folder, dtype, attention).to(device or best_device())


def replace_tower(model: Any) -> Any:
    """Put cached features in the place of the vision tower of a model that is loaded; returns the model.

    The model may have an adapter of PEFT on its language model. The memory of the tower is free afterwards.

    Raises:
        UsageError: this is not such a model, or the adapter has weights in the tower.
    """
    found = load.base_model(model)
    if not isinstance(found, torch.nn.Module) or not hasattr(found, "config"):
        raise UsageError(
            f"{type(model).__name__} is not a model of transformers; load one with: "
            "AutoModelForImageTextToText.from_pretrained(...), or lookonce.load_without_tower(...)"
        )
    name = family_of(found.config).tower
    trained = [one for one, weight in getattr(found.model, name).named_parameters() if weight.requires_grad]
    if trained and found is not model:  # an adapter was added, which left what it does not train frozen
        raise UsageError(
            f"the vision tower has trained weights, such as {trained[0]}, which cached features would leave out; give "
            "LoRA targets in the language model alone, and freeze the tower"
        )
    dtype: Any = found.dtype
    load.replace_tower(found, dtype)
    return model


class VQADataset(torch.utils.data.Dataset[Example]):
    """Records as examples of tokens, each with the keys of its images in a cache; for `DataCollatorForRows`.

    Each answer is a target, the prompt is not. The tokens of a record are made when it is asked for.
    """

    def __init__(
        self, records: Iterable[Record | Mapping[str, Any]], cache: VisionCache, tokenizer: Any, *, revision: str = ""
    ) -> None:
        """Prepare records for a model, whose images a cache has.

        `records` are of lookonce, or rows of any known form with an image, a question and an answer, or with messages:
        a list of dictionaries or a `datasets.Dataset`. `tokenizer` is the model's folder or its name on the Hub, or the
        tokenizer or processor that was loaded from there.

        Raises:
            FeaturesMissing: the cache lacks an image; names the record.
            RecordsError: a row has no known form, or no training can use it.
            ModelError: the tokenizer is not that of a supported model.
            UsageError: the cache is of another model.
        """
        folder = ModelFolder.open(str(locate(_name_of(tokenizer), revision or None)))
        _check_same_model(folder, cache)
        self.cache, self.chat_tokenizer = cache, ChatTokenizer(folder.folder, folder.config)
        self.records = [*_with_keys(records, cache)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Example:
        record, keys = self.records[number]
        return self.chat_tokenizer.example(record, keys, [self.cache.grid_thw(key) for key in keys])


def _name_of(tokenizer: Any) -> str:
    """The folder or the name on the Hub that a tokenizer or a processor was loaded from."""
    if isinstance(tokenizer, Path | str):
        return str(tokenizer)
    name = getattr(getattr(tokenizer, "tokenizer", tokenizer), "name_or_path", "")
    if not name:
        raise UsageError(
            f"it is unknown which model {type(tokenizer).__name__} belongs to; name the folder or the name on the Hub"
        )
    return str(name)


def _check_same_model(folder: ModelFolder, cache: VisionCache) -> None:
    """Check that a cache may have features for a model, by the configuration of the tower."""
    theirs = family_of_tower(cache.fingerprint.tower_config)
    size = int(getattr(folder.vision_config, folder.family.feature_size))
    if theirs is not folder.family or cache.fingerprint.hidden_size != size:
        raise UsageError(
            f"{cache.folder} has features for another model, of {theirs.name}, and {folder.folder} is of "
            f"{folder.family.name}; make a cache with: lookonce.build_cache(images, {str(folder.folder)!r}, ...)"
        )


def _with_keys(rows: Iterable[Record | Mapping[str, Any]], cache: VisionCache) -> Iterator[tuple[Record, Keys]]:
    """Records, each with the keys of its images."""
    keys: dict[Path, str] = {}

    def keep(data: bytes) -> Path:
        key = bytes_key(data)
        keys[path := Path("/", key)] = key
        return path

    reader = Reader(Finder(Path("records").absolute(), None, keep))
    for number, row in enumerate(rows):
        record = row if isinstance(row, Record) else reader.read(_embedded(row), f"row {number}")
        for path in record.images:
            if path not in keys:
                keys[path] = image_key(path)
            if keys[path] not in cache:
                raise FeaturesMissing(
                    f"{cache.folder} lacks the features of an image of {record.origin or f'record {number}'}, {path}; "
                    "add it with: lookonce.build_cache(images, model, folder)"
                )
        yield record, tuple(keys[path] for path in record.images)


def _embedded(value: Any) -> Any:
    """A row in which the bytes of a file stand for each image of Pillow."""
    if isinstance(value, Image.Image):
        return _png(value)
    if isinstance(value, Mapping):
        return {key: _embedded(inner) for key, inner in value.items()}
    return [_embedded(inner) for inner in value] if isinstance(value, list | tuple) else value


class DataCollatorForRows:
    """Makes batches of padded rows for the stock model, with features in the place of pixels."""

    def __init__(self, dataset: VQADataset, *, max_bytes_in_memory: int = 0) -> None:
        """Batches of examples of a dataset. So many bytes of features stay in memory; others are read again."""
        chat = dataset.chat_tokenizer
        source = CachedFeatures(dataset.cache, max_bytes_in_memory)
        self._collator = StockCollator(RowCollator(source, chat.image_token_id, chat.tokenizer.pad_token_id))

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """The inputs of the model for some examples.

        `input_ids`, `attention_mask`, `mm_token_type_ids` and `labels` `[B, T]`, `pixel_values` `[num_tokens,
        num_levels, hidden]` and `image_grid_thw` `[num_images, 3]`.
        """
        return self._collator(examples)
