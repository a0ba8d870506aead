"""The pieces for a training script of one's own: a cache, a model without its tower, a dataset, rows, packs.

Design: each piece is what a library for training expects of its kind: a model of transformers, a dataset by index, a
function that makes a batch of examples. They need no run file, and are the same code that `lookonce train` uses. A
batch of rows is one for the stock model, whose own loss counts, with features in the place of pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image

from lookonce.cache.build.worker import BuildOptions
from lookonce.cache.build.worker import build_cache as build
from lookonce.cache.format import Backend, DtypeName
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Source
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.datasets.images import bytes_key, image_key, index_images, read_bytes
from lookonce.datasets.records import Record, Turn
from lookonce.environment import best_device, device_name
from lookonce.errors import ImageError, UsageError
from lookonce.families.lookup import family_of
from lookonce.hub import locate
from lookonce.run.open import open_model
from lookonce.run.sections import CacheSection
from lookonce.settings import checked
from lookonce.text import shown
from lookonce.train.data.dataset import png_bytes
from lookonce.train.model import load

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
    augment: Mapping[str, Any] | None = None,
) -> VisionCache:
    """Encode images with a model's vision tower, and return their cache; images already in it are not encoded again.

    `images` are paths, bytes of files, images of Pillow, or a column of `datasets`. `model` is a folder or a name on
    the Hub. `folder` holds all caches; each model and each setting has its own subfolder. The options are keys of the
    section `cache` of a run file; with `augment`, variants of all these images are encoded too. The call may be
    interrupted and repeated, and several processes may make it at once.

    Raises:
        ModelError: there is no such model, or it is not of a supported family.
        ImageError: an image cannot be read or encoded; the others are in the cache.
        UsageError: an option has no such value.
        DiskFull: the disk is full; images that are encoded stay in the cache.
    """
    settings = {"backend": backend, "min_pixels": min_pixels, "max_pixels": max_pixels, "dtype": dtype}
    section = checked(settings | {"shard_mb": shard_mb, "augment": augment}, CacheSection, "build_cache")
    if isinstance(images, Path | str | bytes | Image.Image | Mapping) or not isinstance(images, Iterable):
        raise UsageError(f"build_cache: images is {shown(repr(images))}; expected a list of images")
    source, root = Source.of(locate(str(model), revision), settings), Path(folder)
    model_folder, processor, fingerprint = open_model(source)
    provenance = {"model": str(model), "revision": revision, "device": device_name()}
    with TemporaryDirectory(prefix="lookonce-") as temporary:
        paths = [*_files(images, Path(temporary))]
        records = [Record((path,), (Turn("", ""),), origin=str(path)) for path in paths]
        index = index_images(records, needs_one=False)
        if section.augment is not None:
            index = index.with_variants(section.augment, records)
        tower = partial(Tower, model_folder, fingerprint.storage.compute, best_device())
        options = BuildOptions(shard_mb * 1_000_000, provenance)
        report = build(root, fingerprint, processor, index, tower, options)
    source.write_note(root, fingerprint)
    if failed := report.quarantined:
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
        return png_bytes(image)
    if isinstance(image, Mapping) and (data := image.get("bytes")):
        return bytes(data)
    if isinstance(image, Mapping) and (path := image.get("path")):
        return read_bytes(Path(path))
    raise UsageError(
        f"{shown(repr(image))} is not an image; expected a path, the bytes of a file, an image of Pillow, or a row "
        "{'bytes': ..., 'path': ...} of an image column of `datasets`"
    )


def key_of(image: Shown) -> str:
    """The key of an image in caches, the sha256 of its file's bytes; raises ImageError if there is no such file."""
    return image_key(Path(image)) if isinstance(image, Path | str) else bytes_key(_bytes_of(image))


def load_without_tower(
    model: Path | str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    attention: str = "sdpa",
) -> Any:
    """Load a frozen model of transformers that takes cached features instead of running its tower.

    `model` is a folder or a name on the Hub. The result is an instance of the stock class, on the GPU if there is one;
    the tower's weights are never read. Its input `pixel_values` `[num_tokens, num_levels, hidden]` holds the features
    of all images of a batch, one after another, as `VisionCache` returns them; `image_grid_thw` holds their grids.
    Trainer then gives every target of a step the same weight, also with gradient accumulation and several processes,
    which it does not do for the stock model.

    Raises:
        ModelError: there is no such model, it is not of a supported family, or some of its tensors are missing.
    """
    folder = ModelFolder.open(str(locate(str(model), revision)))
    loaded = load.load_without_tower(folder, dtype, attention).to(device or best_device())
    return _weighting_whole_steps(loaded)


def replace_tower(model: Any) -> Any:
    """Make a loaded model take cached features instead of running its vision tower; returns the model.

    The model may have an adapter of PEFT on its language model. The tower's memory is freed.

    Raises:
        UsageError: `model` is not a model of transformers, or the adapter has weights in the tower.
    """
    base = load.base_model(model)
    if not isinstance(base, torch.nn.Module) or not hasattr(base, "config") or not hasattr(base, "model"):
        raise UsageError(
            f"{type(model).__name__} is not a model of transformers; load one with: "
            "AutoModelForImageTextToText.from_pretrained(...), or lookonce.load_without_tower(...)"
        )
    tower = getattr(base.model, family_of(base.config).tower)
    trained = [name for name, weight in tower.named_parameters() if weight.requires_grad]
    if trained and base is not model:  # an adapter was added, which left what it does not train frozen
        raise UsageError(
            f"the vision tower has trained weights, such as {trained[0]}, which cached features would leave out; give "
            "LoRA targets in the language model alone, and freeze the tower"
        )
    dtype: Any = base.dtype
    load.replace_tower(base, dtype)
    _weighting_whole_steps(base)
    return model


def _weighting_whole_steps(model: Any) -> Any:
    """The model, for which Trainer counts the targets of all batches and processes of a step, as the loss can use that.

    transformers says of these models that they cannot. Trainer then averages the means of accumulated batches, whatever
    their numbers of targets are, and so trains on another loss than that of the step.
    """
    model.accepts_loss_kwargs = True
    return model
