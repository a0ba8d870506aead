"""Records as a dataset, and its batches: rows for the stock model, or packs in which questions share their image.

Design: each piece is what a library for training expects of its kind: a dataset by index, a sampler of indices, a
function that makes a batch of examples. So a DataLoader, Trainer or a loop by hand use them without knowing of a cache.
The indices of a pack say how it is packed, so a DataLoader may make its batches in other processes. `PackLoader` makes
them in a thread that reads ahead, as `lookonce train` does.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image, ImageOps
from torch.nn.functional import pad

from lookonce import environment
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.store.fingerprint import hash_tensors
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.augment import Augment, EpochVariants
from lookonce.datasets.formats.image_references import Finder
from lookonce.datasets.formats.registry import Reader
from lookonce.datasets.images import bytes_key, image_key
from lookonce.datasets.records import Record
from lookonce.errors import FeaturesMissing, ImageError, RecordsError, UsageError
from lookonce.hub import locate
from lookonce.run.sections import BatchSection
from lookonce.settings import checked
from lookonce.text import shown
from lookonce.train.data.batches import (
    CPU,
    IGNORED,
    Batch,
    CachedFeatures,
    FeatureSource,
    PackCollator,
    Prefetcher,
    RowCollator,
    image_inputs,
    image_keys,
)
from lookonce.train.data.packing import padded_length
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.data.tokenize import ChatTokenizer, Example, make_examples

Keys = tuple[str, ...]
COLUMN = "input_ids"
"""The column of `VQADataset.to_hf`."""


class VQADataset(torch.utils.data.Dataset[Example]):
    """Records as examples of tokens, each with the keys of its images in a cache.

    Answers are targets, prompts are not. The tokens of a record are made when the record is read.
    """

    epoch = 0
    """Whose variants of images examples have; in packs they have those of the sampler's epoch."""
    variants: EpochVariants | None = None

    def __init__(
        self,
        records: Iterable[Record | Mapping[str, Any]],
        cache: VisionCache,
        tokenizer: Any,
        *,
        revision: str = "",
        augment: Mapping[str, Any] | None = None,
        seed: int = 42,
    ) -> None:
        """Prepare records for a model; `cache` has their images.

        `records` are `Record` objects, or rows in any known format with an image, a question and an answer, or with
        messages: a list of dictionaries or a `datasets.Dataset`. `tokenizer` is the model's folder or its name on the
        Hub, or the tokenizer or processor that was loaded from there. `augment`, as `build_cache` got it, shows another
        variant of each image in each epoch, which `seed` decides.

        Raises:
            FeaturesMissing: the cache lacks an image; names the record.
            RecordsError: a row has no known form, or no training can use it.
            ModelError: the tokenizer is not that of a supported model.
            UsageError: the cache is of another model, or the answers would not be true of the variants.
        """
        if not hasattr(cache, "fingerprint"):
            raise UsageError(f"VQADataset: {cache!r} is not a cache; open its folder with VisionCache.open")
        folder = ModelFolder.open(str(locate(_name_of(tokenizer), revision or None)))
        _check_same_tower(folder, cache)
        self.cache = cache
        self.features: FeatureSource = CachedFeatures(cache)
        self.chat_tokenizer = ChatTokenizer(folder.folder, folder.config)
        self.records = [*_with_keys(records, cache)]
        self._examples: Sequence[Example] | None = None
        if augment is not None:
            self.variants = EpochVariants(checked(dict(augment), Augment, "augment"), seed)
            _check_variants(self.variants.augment, self.records, cache)

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        chat_tokenizer: ChatTokenizer,
        features: FeatureSource,
        variants: EpochVariants | None = None,
    ) -> VQADataset:
        """A dataset of examples that are made already, whose images, and `variants` of these, have `features`."""
        dataset = cls.__new__(cls)
        dataset.chat_tokenizer, dataset.features, dataset._examples = chat_tokenizer, features, examples
        dataset.variants = variants
        return dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the variants of images that examples have from now on; Trainer calls this in one process."""
        self.epoch = epoch

    def examples(self) -> Sequence[Example]:
        """All examples with the images themselves, which are made faster together."""
        if self._examples is None:
            keys = dict(pair for record, keys in self.records for pair in zip(record.images, keys, strict=True))
            records = [record for record, _ in self.records]
            self._examples, _ = make_examples(
                self.chat_tokenizer, records, keys.__getitem__, self.cache.grid_thw, sys.maxsize
            )
        return self._examples

    def __len__(self) -> int:
        return len(self.records if self._examples is None else self._examples)

    def __getitems__(self, numbers: list[int]) -> Any:
        """The examples of a batch; of a pack with how they are packed."""
        if isinstance(numbers, PackIndices):
            epoch = numbers.micro_batch.epoch
            return PackedExamples({number: self._shown(number, epoch) for number in numbers}, numbers)
        return [self[number] for number in numbers]

    def to_hf(self) -> Any:
        """The examples as a `datasets.Dataset`, on which TRL's SFTTrainer insists; for `DataCollatorForRows`.

        Its only column has the name of an input of every model, `input_ids`, so that trainers keep it. It holds numbers
        of examples, and a row gives the example itself, from which no other collator makes a batch. It may be shuffled,
        split and selected from.

        Raises:
            UsageError: the library `datasets` is not installed.
        """
        try:
            datasets: Any = importlib.import_module("datasets")  # Hugging Face's; a folder here has the same name
        except ImportError:
            raise UsageError("VQADataset.to_hf needs the library `datasets`; run: pip install datasets") from None
        return datasets.Dataset.from_dict({COLUMN: range(len(self))}).with_transform(_Rows(self))

    def __getitem__(self, number: int) -> Example:
        return self._shown(number, self.epoch)

    def _shown(self, number: int, epoch: int) -> Example:
        """An example with the variants of its images that an epoch shows."""
        if self._examples is not None:
            example = self._examples[number]
        else:
            record, keys = self.records[number]
            example = self.chat_tokenizer.example(record, keys, [self.cache.grid_thw(key) for key in keys])
        if self.variants is None:
            return example
        return replace(example, image_keys=self.variants.keys(example.image_keys, epoch))


class _Rows:
    """Gives the examples of numbers.

    `datasets` copies and hashes what a dataset has at each split and selection. Copies share it. It is pickled in C,
    since the pickler of `datasets` takes seconds for tens of thousands of records.
    """

    def __init__(self, dataset: VQADataset) -> None:
        self.dataset = dataset

    def __call__(self, batch: Mapping[str, list[int]]) -> dict[str, list[Example]]:
        return {COLUMN: [self.dataset[number] for number in batch[COLUMN]]}

    def __deepcopy__(self, memo: Any) -> _Rows:
        return self

    def __reduce__(self) -> Any:
        return _unpickled_rows, (pickle.dumps(self.dataset),)


def _unpickled_rows(data: bytes) -> _Rows:
    return _Rows(pickle.loads(data))


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


def _check_variants(augment: Augment, records: Sequence[tuple[Record, Keys]], cache: VisionCache) -> None:
    augment.check(record for record, _ in records)
    for record, keys in records:
        if lacking := next((variant for key in keys for variant in augment.of(key) if variant.key not in cache), None):
            raise FeaturesMissing(
                f"{cache.folder} lacks {lacking.text(f'an image of {record.origin}')}; add it with: "
                f"lookonce.build_cache(images, model, folder, augment={augment.model_dump(exclude_defaults=True)})"
            )


def _embedded(value: Any) -> Any:
    """A row in which the bytes of a file stand for each image of Pillow."""
    if isinstance(value, Image.Image):
        return png_bytes(value)
    if isinstance(value, Mapping):
        return {key: _embedded(inner) for key, inner in value.items()}
    return [_embedded(inner) for inner in value] if isinstance(value, list | tuple) else value


def png_bytes(image: Image.Image) -> bytes:
    """An image of Pillow as the file that stands for it: RGB, as transformers reads images."""
    if 0 in image.size:
        raise ImageError(f"an image of {image.width} x {image.height} pixels cannot be read")
    data = io.BytesIO()
    ImageOps.exif_transpose(image).convert("RGB").save(data, "PNG", compress_level=0)
    return data.getvalue()


class DataCollatorForRows:
    """Makes batches of padded rows for the stock model, with features instead of pixels."""

    def __init__(self, dataset: VQADataset) -> None:
        """Batches of examples of a dataset."""
        self._rows = RowCollator.of(dataset.chat_tokenizer, dataset.features)

    def __call__(self, rows: Sequence[Example | Mapping[str, Any]]) -> Batch:
        """The inputs of the model for some examples, or rows of `VQADataset.to_hf`.

        `input_ids`, `attention_mask`, `mm_token_type_ids` and `labels` `[B, T]`, `pixel_values` `[num_tokens,
        num_levels, hidden]` and `image_grid_thw` `[num_images, 3]`.

        Raises:
            UsageError: the rows are neither.
        """
        examples = [_example_of(row) for row in rows]
        batch = self._rows(examples)
        del batch["logits_to_keep"], batch["targets"], batch["weights"]
        length = batch["input_ids"].shape[1]
        flags = [torch.from_numpy(example.expanded(self._rows.image_token_id)[1]) for example in examples]
        supervised = torch.stack([pad(row, (0, length - len(row))) for row in flags])
        return batch | {"labels": torch.where(supervised, batch["input_ids"], IGNORED)}


def _example_of(row: Any) -> Example:
    example = row.get(COLUMN) if isinstance(row, Mapping) else row
    if not isinstance(example, Example):
        raise UsageError(
            f"DataCollatorForRows takes examples of a VQADataset or rows of its to_hf(), not {shown(repr(row))}; give "
            "the trainer: VQADataset(rows, cache, model), or for TRL: VQADataset(rows, cache, model).to_hf()"
        )
    return example


class PackIndices(list[int]):
    """The numbers of the examples of a pack, with how they are packed."""

    def __init__(self, micro_batch: MicroBatch, ends_step: bool, num_ranks: int, batch: BatchSection) -> None:
        super().__init__(micro_batch.pack.examples)
        self.micro_batch, self.ends_step, self.num_ranks = micro_batch, ends_step, num_ranks
        self.tokens_per_pack, self.are_rows = batch.tokens_per_pack, not batch.has_packs


@dataclass(frozen=True)
class PackedExamples:
    """The examples of a pack, as `VQADataset` gives them for the indices of `PackBatchSampler`."""

    examples: Mapping[int, Example]
    indices: PackIndices


class PackBatchSampler(torch.utils.data.Sampler[list[int]]):
    """The packs of an epoch, in which questions share their image: `batch_sampler` of a DataLoader.

    An optimizer step is exactly `samples_per_step` examples, in as many packs as they need. The packs of a step follow
    one another, and the last one ends it. The weight of a target in the loss depends on its whole step, so the loss of
    a step is the sum of the losses of its packs: do not divide by their number.
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
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        """Group the examples of a dataset by their images; the options are keys of a run file's section `batch`.

        With several processes, each gets its own packs of every step, the same number in every process. Losses are
        scaled for gradients that are averaged over the processes, as DistributedDataParallel averages them. `rank` and
        `num_ranks` are by default those of the process group, or those that torchrun set.

        Raises:
            RecordsError: a record has more than `tokens_per_pack` tokens.
            UsageError: an option has no such value, or `rank` is not below `num_ranks`.
        """
        longest = max(dataset.examples(), key=lambda example: example.num_tokens)
        if longest.num_tokens > tokens_per_pack:
            raise RecordsError(
                f"{longest.origin} has {longest.num_tokens:,} tokens, more than tokens_per_pack: {tokens_per_pack:,}; "
                "raise it, leave the record out, or lower max_pixels of build_cache"
            )
        order: Literal["random", "as_given"] = "random" if shuffle else "as_given"
        options = {"samples_per_step": samples_per_step, "tokens_per_pack": tokens_per_pack, "loss": loss}
        batch = checked(options | {"order": order}, BatchSection, "PackBatchSampler")
        self._set(dataset, batch, seed, rank, num_ranks)

    @classmethod
    def of(
        cls, dataset: VQADataset, batch: BatchSection, seed: int, rank: int | None = None, num_ranks: int | None = None
    ) -> PackBatchSampler:
        """The packs, or batches of rows, of a run file's section `batch`."""
        sampler = cls.__new__(cls)
        sampler._set(dataset, batch, seed, rank, num_ranks)
        return sampler

    def _set(
        self, dataset: VQADataset, batch: BatchSection, seed: int, rank: int | None, num_ranks: int | None
    ) -> None:
        own_rank, num_processes = _ranks()
        rank = own_rank if rank is None else rank
        num_ranks = num_processes if num_ranks is None else num_ranks
        if not 0 <= rank < num_ranks:
            raise UsageError(
                f"PackBatchSampler: rank is {rank}, but of {num_ranks} processes it is 0 to {num_ranks - 1}"
            )
        token_id = dataset.chat_tokenizer.image_token_id
        self.dataset, self.batch = dataset, batch
        self.plan = Sampler.of(dataset.examples(), token_id, batch, seed, rank=rank, num_ranks=num_ranks)
        self.epoch = 0
        """The next epoch; each has its own order, which the seed determines."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps per epoch."""
        return len(self.plan)

    @property
    def batch_size(self) -> int:
        """Packs have no fixed size. accelerate asks for it where it would divide the packs among the processes again.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "the packs are divided among the processes already, and accelerate would divide them again, which leaves "
            "packs out of their steps; write accelerator.prepare(model, optimizer), without the DataLoader of packs"
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that comes next, for example when a training is resumed."""
        self.epoch = epoch

    def steps(self, start: int, end: int) -> Iterator[list[PackIndices]]:
        """The packs of the steps `start` to `end` of a training, across its epochs."""
        for micro_batches in self.plan.steps(start, end):
            yield self.step_of(micro_batches)

    def step_of(self, micro_batches: Sequence[MicroBatch]) -> list[PackIndices]:
        """The indices of the packs of a step."""
        last, num_ranks = len(micro_batches) - 1, self.plan.num_ranks
        return [
            PackIndices(micro_batch, number == last, num_ranks, self.batch)
            for number, micro_batch in enumerate(micro_batches)
        ]

    def __len__(self) -> int:
        """Packs of the next epoch."""
        return sum(map(len, self.plan.epoch(self.epoch)))

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for step in self.plan.epoch(epoch):
            yield from self.step_of(step)


def _ranks() -> tuple[int, int]:
    """The number of this process and how many train together: of the process group, or as torchrun has set them."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return environment.rank(), environment.num_ranks()


class DataCollatorForPacks:
    """Makes the batch of a pack, for `pack_loss`."""

    def __init__(self, dataset: VQADataset, *, device: torch.device = CPU, pads_to_blocks: bool | None = None) -> None:
        """Packs of a dataset, on a device; a DataLoader expects them on the CPU.

        `pads_to_blocks`: whether packs are padded to whole blocks of FlexAttention, as they must be for a GPU; by
        default if there is one.
        """
        chat, self._features, self._device = dataset.chat_tokenizer, dataset.features, device
        self._rows, self._packs = RowCollator.of(chat, self._features), PackCollator.of(chat, self._features)
        self.pads_to_blocks = torch.cuda.is_available() if pads_to_blocks is None else pads_to_blocks

    def __call__(self, packed: PackedExamples) -> dict[str, Any]:
        """The model's inputs, the targets and their weights, and how the pack fits into its step.

        `ends_step` is True for the last pack of a step: the optimizer steps after it. For the shapes of the tensors see
        `PackCollator`.

        Raises:
            UsageError: these are not examples of a pack.
        """
        if not isinstance(packed, PackedExamples):
            raise UsageError(
                "DataCollatorForPacks needs packs; give the DataLoader a batch_sampler: "
                "DataLoader(dataset, batch_sampler=PackBatchSampler(dataset), collate_fn=DataCollatorForPacks(dataset))"
            )
        indices, examples = packed.indices, packed.examples
        weights = indices.micro_batch.target_weights
        if indices.are_rows:
            first = [examples[index] for index in indices]
            text = self._rows.text_batch(first, weights)
        else:
            pack = indices.micro_batch.pack
            length = padded_length(pack.num_tokens) if self.pads_to_blocks else pack.num_tokens
            first = [examples[group.examples[0]] for group in pack.groups]
            text = self._packs(pack.groups, examples, weights, length)
        batch = {name: tensor.to(self._device, non_blocking=True) for name, tensor in text.items()}
        about = {name: getattr(indices, name) for name in ("ends_step", "num_ranks", "tokens_per_pack")}
        return batch | image_inputs(self._features, image_keys(first), self._device) | about


class PackLoader:
    """The packs of some epochs on a device, read ahead by a thread, also from one epoch into the next.

    It yields the same packs as `DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForPacks(dataset))`.
    A DataLoader copies the features between processes, several hundred megabytes a second, and starts each epoch
    without packs read ahead. It has no length, because epochs have different numbers of packs; `num_steps` counts
    optimizer steps.
    """

    def __init__(
        self, sampler: PackBatchSampler, *, num_epochs: int = 1, device: torch.device | None = None, num_ahead: int = 2
    ) -> None:
        """Packs of `num_epochs` epochs, beginning with the sampler's next, on the GPU if there is one.

        `num_ahead` packs are copied to the device in advance.
        """
        self.sampler, self.num_epochs, self.num_ahead = sampler, num_epochs, num_ahead
        self.device = device or environment.best_device()
        if self.device == torch.device("cuda"):  # the thread that reads ahead has a current GPU of its own
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.num_epochs * self.sampler.num_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches of `DataCollatorForPacks`, one per pack; a pack's error is raised when that pack is next."""
        sampler = self.sampler
        collator, start = DataCollatorForPacks(sampler.dataset, device=self.device), sampler.epoch * sampler.num_steps
        ahead = Prefetcher(
            sampler.steps(start, start + self.num_steps),
            lambda indices: collator(sampler.dataset.__getitems__(indices)),
            self.device,
            self.num_ahead,
        )
        with contextlib.closing(ahead):
            for _ in range(self.num_epochs):
                sampler.epoch += 1
                for _ in range(sampler.num_steps):
                    for pack, _ in ahead.step():
                        yield pack
