"""What records cost a training, in tokens: a record, an image, and an epoch with and without the shared prefix.

Design: nothing is estimated. Records become examples, groups and packs by the very code that trains (prompt.py,
groups.py, steps.py, packs.py), for a model of which only the tokenizer and the image processor's settings are needed.
An image's tokens follow from its size, so no pixel is decoded. The same text is tokenised once, however many images it
is asked about: 8,786 real questions take half a second instead of four.

Where an image is not there its size is unknown: it counts as `image_tokens`, if these are given, else as none, and the
report says so. Padding is not counted: neither that of rows, nor that of packs to whole blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoConfig, Qwen3VLConfig

from lookonce.cache.build.planner import planned_tokens
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.audit.corpus import Material, RecordsFile
from lookonce.datasets.audit.findings import Finding, Item, find, valid
from lookonce.datasets.audit.page import Section
from lookonce.datasets.records import Record, Turn
from lookonce.errors import ModelError, RecordsError
from lookonce.run.config import BatchSection
from lookonce.text import count, table
from lookonce.train.data.sampler import Order
from lookonce.train.data.tokenize import Example, Prompter

NUM_TEXTS = 1 << 16
"""Different texts whose tokens are kept."""


@dataclass(frozen=True)
class Spread:
    """How numbers are spread."""

    mean: float
    median: int
    p99: int
    """99 of 100 are not above it."""
    max: int

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Spread:
        """Of numbers and how often each occurs."""
        ordered = sorted(Counter(counts).elements())
        if not ordered:
            return cls(0.0, 0, 0, 0)
        last = len(ordered) - 1
        return cls(sum(ordered) / len(ordered), ordered[last // 2], ordered[-(-99 * last // 100)], ordered[-1])

    def cells(self) -> tuple[str, ...]:
        return f"{self.mean:,.1f}", f"{self.median:,}", f"{self.p99:,}", f"{self.max:,}"


@dataclass(frozen=True)
class Cost:
    """One file's tokens."""

    file: str
    num_records: int
    """That would be trained on."""
    too_long: tuple[Item, ...]
    refused: tuple[Item, ...]
    """Records that training would stop at, and why."""
    record_tokens: Spread
    num_text_tokens: int
    """Of all records, with the template's own."""
    num_image_tokens: int
    """Of all records, an image as often as it is asked about."""
    num_supervised: int
    num_separate: int
    """Tokens of an epoch with each record on its own."""
    num_shared: int
    """With each group's prefix once."""
    num_packed: int
    """As the steps of an epoch have it, which cut some groups."""
    num_packs: int

    @property
    def times(self) -> float:
        """How many times fewer tokens than separately, as an epoch goes."""
        return self.num_separate / max(self.num_packed, 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"times_fewer": self.times}


@dataclass(frozen=True)
class Costs:
    """All files' tokens."""

    tokenizer: str
    batch: BatchSection
    files: tuple[Cost, ...]
    image_tokens: Mapping[int, int]
    """How many distinct images become so many tokens; those of unknown size are not in it."""
    num_unknown: int
    """Images whose size is not known, or is none that the image processor takes."""
    assumed: int | None
    """What each of these counts."""

    def to_json(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "batch": self.batch.model_dump(include={"samples_per_step", "tokens_per_pack", "max_tokens"}),
            "files": [valid(cost.to_json()) for cost in self.files],
            "image_tokens": asdict(Spread.of(self.image_tokens))
            | {"images": {str(number): images for number, images in sorted(self.image_tokens.items())}},
            "num_unknown_images": self.num_unknown,
            "assumed_image_tokens": self.assumed,
        }

    def findings(self) -> list[Finding]:
        """What a training would leave out or stop at."""
        too_long = [item for cost in self.files for item in cost.too_long]
        refused = [item for cost in self.files for item in cost.refused]
        limit = self.batch.longest_record
        return [
            *find("refused", "error", refused, f"{count(len(refused), 'record')} that training refuses", _reason),
            *find(
                "too-long",
                "warning",
                too_long,
                f"{count(len(too_long), 'record')} of more than {limit:,} tokens, which training leaves out",
                lambda item: f"{item['tokens']:,} tokens ({item['place']})",
            ),
        ]

    def text(self) -> str:
        """Tables: of records, of images, of an epoch."""
        tables = [table(header, lines) for header, lines in self._tables()]
        return "\n\n".join([*tables, *([self.unknown()] if self.num_unknown else [])])

    def section(self) -> Section:
        """The same for a page, with a plot of tokens an image."""
        says = f"Counted by the code that trains, with {self.tokenizer}. {self.unknown()}"
        return Section("Tokens per image, and of an epoch", says, self._tables(), self.image_tokens, "tokens", "images")

    def unknown(self) -> str:
        """What is to be known of images of unknown size."""
        if not self.num_unknown:
            return ""
        images = f"{count(self.num_unknown, 'image')} of unknown size"
        if self.assumed is None:
            return f"{images} count no tokens, so this is text alone; `--image-tokens 400` counts each as so many"
        return f"{images} count {self.assumed:,} tokens each, as `--image-tokens` says"

    def _tables(self) -> list[tuple[Sequence[str], Sequence[Sequence[str]]]]:
        records = [
            (cost.file, *cost.record_tokens.cells(), f"{cost.num_supervised:,}", f"{len(cost.too_long):,}")
            for cost in self.files
        ]
        epochs = [
            (
                cost.file,
                f"{cost.num_separate:,}",
                f"{cost.num_shared:,}",
                f"{cost.num_packed:,}",
                f"{cost.num_packs:,}",
                f"{cost.times:.1f}",
            )
            for cost in self.files
        ]
        steps = f"in steps of {self.batch.samples_per_step}"
        spread = ("mean", "median", "99 %", "most")
        images = [(("tokens an image", *spread), [("all files", *Spread.of(self.image_tokens).cells())])]
        return [
            (("tokens a record", *spread, "supervised in all", "too long"), records),
            *(images if self.image_tokens else []),
            (("tokens of an epoch", "separate", "shared prefix", steps, "packs", "times fewer"), epochs),
        ]


class Ruler:
    """Makes examples and counts an image's tokens, for the model of a folder."""

    def __init__(self, folder: Path, max_pixels: int | None = None) -> None:
        """Load tokenizer, chat template and image processor settings; weights are not needed.

        Raises:
            ModelError: some of it is missing.
        """
        if not folder.is_dir():
            raise ModelError(f"no folder at {folder}; name one with a model's tokenizer and preprocessor_config.json")
        self.processor = ImageProcessor(folder, max_pixels=max_pixels)
        self.merge_size: int = self.processor.settings["merge_size"]
        self.prompter = Prompter(folder, _config(folder, self.merge_size))
        self._tokenised = lru_cache(NUM_TEXTS)(self._tokenise)

    def example(self, record: Record, keys: Sequence[str], image_tokens: Sequence[int]) -> Example:
        """As training makes it of the record.

        Raises:
            RecordsError: training would refuse it.
        """
        try:
            bare = self._tokenised(record.system, record.turns, len(keys))
        except RecordsError as error:
            raise RecordsError(f"{record.origin}{error}") from None
        return replace(bare, image_keys=tuple(keys), num_image_tokens=tuple(image_tokens), origin=record.origin)

    def _tokenise(self, system: str | None, turns: tuple[Turn, ...], num_images: int) -> Example:
        record = Record((Path("image"),) * num_images, turns, system)
        return self.prompter.example(record, [""] * num_images, [(1, 1, 1)] * num_images)


def measure(material: Material, ruler: Ruler, tokenizer: str, batch: BatchSection, assumed: int | None = None) -> Costs:
    """The tokens of each file. `assumed` is what an image of unknown size counts."""
    known = {
        picture.key: planned_tokens(ruler.processor, picture.size)
        for picture in material.pictures.values()
        if picture.size
    }
    known = {key: number for key, number in known.items() if number}
    images = {material.identity(path) for path in material.pictures}

    def tokens_of(key: str) -> int:
        return known.get(key, assumed or 0)

    return Costs(
        tokenizer,
        batch,
        tuple(_cost(file, material, ruler, batch, tokens_of) for file in material.files),
        Counter(known.values()),
        len(images - known.keys()),
        assumed,
    )


def _cost(
    file: RecordsFile, material: Material, ruler: Ruler, batch: BatchSection, tokens_of: Callable[[str], int]
) -> Cost:
    examples, refused = _examples(file, material, ruler, tokens_of)
    kept = [example for example in examples if example.num_tokens <= batch.longest_record]
    long = [example for example in examples if example.num_tokens > batch.longest_record]
    order = Order.of(kept, ruler.prompter.image_token_id, batch, seed=0)
    packs = order.lengths(0)
    num_image_tokens = sum(sum(example.num_image_tokens) for example in kept)
    num_separate = sum(example.num_tokens for example in kept)
    return Cost(
        file=file.name,
        num_records=len(kept),
        too_long=tuple({"place": example.origin, "tokens": example.num_tokens} for example in long),
        refused=tuple(refused),
        record_tokens=Spread.of(Counter(example.num_tokens for example in examples)),
        num_text_tokens=num_separate - num_image_tokens,
        num_image_tokens=num_image_tokens,
        num_supervised=sum(int(example.supervised.sum()) for example in kept),
        num_separate=num_separate,
        num_shared=sum(group.num_tokens for group in order.groups),
        num_packed=sum(packs),
        num_packs=len(packs),
    )


def _examples(
    file: RecordsFile, material: Material, ruler: Ruler, tokens_of: Callable[[str], int]
) -> tuple[list[Example], list[Item]]:
    """Of all records that training takes, and why it refuses the others."""
    examples, refused = [], []
    for record in tqdm(file.records, desc=f"count tokens of {file.name}", unit="record", leave=False, disable=None):
        record = replace(record, origin=file.place(record))
        keys = [material.identity(image) for image in record.images]
        try:
            examples.append(ruler.example(record, keys, [tokens_of(key) for key in keys]))
        except RecordsError as error:
            refused.append({"place": record.origin, "reason": str(error)})
    return examples, refused


def _config(folder: Path, merge_size: int) -> Any:
    """The model's own where there is one; else Qwen3-VL's, which the tokenizer is compared with."""
    if (folder / "config.json").exists():
        return AutoConfig.from_pretrained(folder)
    return Qwen3VLConfig(vision_config={"spatial_merge_size": merge_size})


def _reason(item: Item) -> str:
    return str(item["reason"])
