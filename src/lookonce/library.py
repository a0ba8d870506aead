"""The pieces for a training script of one's own: a cache, a model without its tower, a dataset, rows, packs.

Design: each piece is what a library for training expects of its kind: a model of transformers, a dataset by index, a
function that makes a batch of examples. So Trainer, accelerate or a loop by hand use them without knowing of a cache.
They need no run file, and are the same code that `lookonce train` uses. A batch of rows is one for the stock model,
whose own loss counts; the features of its images are in the place of their pixels.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from PIL import Image, ImageOps

from lookonce.cache.build.worker import BuildOptions
from lookonce.cache.build.worker import build_cache as build
from lookonce.cache.format import Backend, DtypeName
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Source, hash_tensors
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.datasets.formats.image_references import Finder
from lookonce.datasets.formats.registry import Reader
from lookonce.datasets.images import bytes_key, image_key, index_images
from lookonce.datasets.records import Record, Turn
from lookonce.environment import best_device, device_name
from lookonce.errors import FeaturesMissing, ImageError, RecordsError, UsageError
from lookonce.families.lookup import family_of
from lookonce.hub import locate
from lookonce.run.open import open_model
from lookonce.run.sections import BatchSection
from lookonce.text import shown
from lookonce.train.data.batches import Batch, CachedFeatures, PackCollator, RowCollator, StockCollator, image_inputs
from lookonce.train.data.conversations import make_examples
from lookonce.train.data.packing import padded_length
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model import load
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.loss import forward_loss

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
        _check_same_tower(folder, cache)
        self.cache, self.chat_tokenizer = cache, ChatTokenizer(folder.folder, folder.config)
        self.records = [*_with_keys(records, cache)]
        self._examples: list[Example] | None = None

    def examples(self) -> list[Example]:
        """All examples, which are made faster together."""
        if self._examples is None:
            keys = dict(pair for record, keys in self.records for pair in zip(record.images, keys, strict=True))
            records = [record for record, _ in self.records]
            self._examples, _ = make_examples(
                self.chat_tokenizer, records, keys.__getitem__, self.cache.grid_thw, sys.maxsize
            )
        return self._examples

    def __len__(self) -> int:
        return len(self.records)

    def __getitems__(self, numbers: list[int]) -> Any:
        """The examples of a batch; of a pack with how they are packed."""
        if isinstance(numbers, PackIndices):
            examples = {one: self[one] for one in numbers}
            return PackedExamples(examples, numbers.micro_batch, numbers.ends_step, numbers.num_ranks)
        return [self[one] for one in numbers]

    def __getitem__(self, number: int) -> Example:
        if self._examples is not None:
            return self._examples[number]
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


def _check_same_tower(folder: ModelFolder, cache: VisionCache) -> None:
    """Check that a cache has features of a model's own tower; reads the tower, 1.2 GB for an 8B."""
    if hash_tensors(folder.tower_tensors()) != cache.fingerprint.tower_sha256:
        raise UsageError(
            f"{cache.folder} has features of another vision tower than that of {folder.folder}; make a cache with: "
            f"lookonce.build_cache(images, {str(folder.folder)!r}, folder)"
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
        """Batches of examples of a dataset. At most this many bytes of features stay in memory."""
        chat = dataset.chat_tokenizer
        source = CachedFeatures(dataset.cache, max_bytes_in_memory)
        self._collator = StockCollator(RowCollator(source, chat.image_token_id, chat.tokenizer.pad_token_id))

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """The inputs of the model for some examples.

        `input_ids`, `attention_mask`, `mm_token_type_ids` and `labels` `[B, T]`, `pixel_values` `[num_tokens,
        num_levels, hidden]` and `image_grid_thw` `[num_images, 3]`.
        """
        return self._collator(examples)


@dataclass(frozen=True)
class PackedExamples:
    """The examples of a pack, as `VQADataset` gives them for the indices of `PackBatchSampler`."""

    examples: Mapping[int, Example]
    micro_batch: MicroBatch
    ends_step: bool
    num_ranks: int


class PackIndices(list[int]):
    """The numbers of the examples of a pack, with how they are packed."""

    def __init__(self, micro_batch: MicroBatch, ends_step: bool, num_ranks: int) -> None:
        super().__init__(index for group in micro_batch.pack.groups for index in group.examples)
        self.micro_batch, self.ends_step, self.num_ranks = micro_batch, ends_step, num_ranks


class PackBatchSampler(torch.utils.data.Sampler[list[int]]):
    """The packs of an epoch, in which questions share their image: `batch_sampler` of a DataLoader.

    An optimizer step is exactly `samples_per_step` examples, in as many packs as they need. The packs of a step follow
    one another, and the last one ends it. What a target weighs in the loss depends on its whole step, so the loss of a
    step is the sum of the losses of its packs: do not divide by their number.
    """

    def __init__(
        self,
        dataset: VQADataset,
        *,
        samples_per_step: int = 16,
        tokens_per_pack: int = 8192,
        seed: int = 42,
        loss: Literal["token", "sample"] = "token",
        shuffle: bool = True,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Group the examples of a dataset by their images; the options are keys of a run file's section `batch`.

        Of several processes each has its own packs of every step, equally many in all. Their losses are meant for
        gradients that are averaged over the processes, as DistributedDataParallel does.

        Raises:
            RecordsError: a record has more than `tokens_per_pack` tokens.
        """
        examples = dataset.examples()
        if longest := max((one for one in examples if one.num_tokens > tokens_per_pack), key=_length, default=None):
            raise RecordsError(
                f"{longest.origin} has {longest.num_tokens:,} tokens, more than tokens_per_pack: {tokens_per_pack:,}; "
                "raise it, leave the record out, or lower max_pixels of build_cache"
            )
        order: Literal["random", "as_given"] = "random" if shuffle else "as_given"
        batch = BatchSection(samples_per_step=samples_per_step, tokens_per_pack=tokens_per_pack, loss=loss, order=order)
        ranks = {"rank": rank, "num_ranks": num_ranks}
        self._sampler = Sampler.of(examples, dataset.chat_tokenizer.image_token_id, batch, seed, **ranks)
        self.epoch = 0
        """Which epoch comes next; each has an order of its own, which follows from the seed."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps per epoch."""
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, for example when a training is resumed."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Packs of the next epoch."""
        return len(self._sampler.pack_lengths(self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for step in self._sampler.epoch(epoch):
            for number, micro_batch in enumerate(step, start=1):
                yield PackIndices(micro_batch, number == len(step), self._sampler.num_ranks)


class DataCollatorForPacks:
    """Makes the batch of a pack."""

    def __init__(self, dataset: VQADataset, *, max_bytes_in_memory: int = 0) -> None:
        """Packs of a dataset. At most this many bytes of features stay in memory."""
        source = CachedFeatures(dataset.cache, max_bytes_in_memory)
        self._collator = PackCollator.of(dataset.chat_tokenizer, source)
        self._pads = torch.cuda.is_available()  # FlexAttention takes whole blocks

    def __call__(self, packed: PackedExamples) -> dict[str, Any]:
        """The batch of a pack, for `pack_loss`; `ends_step` says whether the optimizer's step comes after it.

        Raises:
            UsageError: these are not examples of a pack.
        """
        if not isinstance(packed, PackedExamples):
            raise UsageError(
                "DataCollatorForPacks needs packs; give the DataLoader a batch_sampler: "
                "DataLoader(dataset, batch_sampler=PackBatchSampler(dataset), collate_fn=DataCollatorForPacks(dataset))"
            )
        pack, examples = packed.micro_batch.pack, packed.examples
        length = padded_length(pack.num_tokens) if self._pads else pack.num_tokens
        batch = self._collator(pack.groups, examples, packed.micro_batch.target_weights, length)
        shown = [key for group in pack.groups for key in examples[group.examples[0]].image_keys]
        about = {"ends_step": packed.ends_step, "num_ranks": packed.num_ranks}
        return batch | image_inputs(self._collator.source, shown) | about


def packed_attention(model: Any, *, compiled: bool = False) -> contextlib.AbstractContextManager[None]:
    """Within the block a model attends as packs need it, and trains on them as `lookonce train` does.

    With `compiled`, on a GPU, its decoder layers are compiled, which takes up to a minute. Undone on exit.

    Raises:
        ModelError: a layer does not use full attention, so it would mix the questions of a pack.
    """
    return training_on_packs(model, compiled=compiled)


def pack_loss(model: Any, pack: Mapping[str, Any]) -> torch.Tensor:
    """The share of a pack in the loss of its step; the sum over the packs of a step is the stock model's loss of it.

    Of several processes it is the share times their number, because DistributedDataParallel averages gradients. `pack`
    comes from `DataCollatorForPacks`; its tensors are moved to the model's device. Within `packed_attention`.

    Raises:
        UsageError: several processes train, and the packs are not divided among them.
    """
    found = _num_processes()
    if found != pack["num_ranks"]:
        raise UsageError(
            f"the packs are for {pack['num_ranks']} of {found} processes that train together; "
            "write: PackBatchSampler(dataset, rank=..., num_ranks=...), and do not let accelerator.prepare divide the "
            "DataLoader again"
        )
    device = load.base_model(model).device
    on_cpu = ("image_grid_thw",)  # reading the grids on a GPU would wait for it
    batch = {
        name: value.to(device, non_blocking=True) if name not in on_cpu else value
        for name, value in pack.items()
        if name not in ("ends_step", "num_ranks")
    }
    length = batch["seen_until"].shape[0]
    return forward_loss(model, batch, _mask_of(device, 1 << (length - 1).bit_length())) * found


def _num_processes() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


@cache
def _mask_of(device: torch.device, max_tokens: int) -> PackMask:
    return PackMask(padded_length(max_tokens), device)


def _length(example: Example) -> int:
    return example.num_tokens
