"""Count what records cost in training tokens: per record, per image, and per epoch with and without shared prefixes.

Nothing is estimated: the code that trains makes examples, groups and packs. It needs a model's tokenizer and the
settings of its image processor alone, since an image's tokens follow from its size. An image of unknown size counts no
tokens, and the report says how many there are. Padding is not counted, neither of rows nor of packs to whole blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import CONFIG_MAPPING, AutoConfig

from lookonce.cache.build.progress import planned_tokens
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.audit.audit import Section
from lookonce.datasets.audit.findings import Corpus, CorpusFile, Finding, Item, encodable, findings_from
from lookonce.datasets.records import Record
from lookonce.errors import ModelError, RecordsError
from lookonce.families.lookup import DEFAULT, family_in
from lookonce.run.sections import BatchSection
from lookonce.text import count, table
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.tokenize import ChatTokenizer, Example

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and its lines."""


@dataclass(frozen=True)
class Distribution:
    """Mean, median, 99th percentile and maximum of some counts."""

    mean: float
    median: int
    p99: int
    max: int

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Distribution:
        """The distribution of numbers, given how often each occurs."""
        ordered = sorted(Counter(counts).elements())
        if not ordered:
            return cls(0.0, 0, 0, 0)
        last = len(ordered) - 1
        return cls(sum(ordered) / len(ordered), ordered[last // 2], ordered[-(-99 * last // 100)], ordered[-1])


@dataclass(frozen=True)
class FileTokens:
    file: str
    num_records: int
    """Number of records that would be trained on."""
    too_long: tuple[Item, ...]
    """Records that training leaves out because they are too long, with their lengths."""
    refused: tuple[Item, ...]
    """Records that training would stop at, with the reasons."""
    record_tokens: Distribution
    num_text_tokens: int
    """Text tokens of all records, those of the chat template included."""
    num_image_tokens: int
    """Image tokens of all records; an image counts once per record that shows it."""
    num_supervised: int
    num_separate: int
    """Tokens of an epoch if each record is a sequence of its own."""
    num_shared: int
    """Tokens of an epoch if each group's prefix is processed once."""
    num_packed: int
    """Tokens of an epoch as it is trained: steps and packs split some groups, which repeats their prefixes."""
    num_packs: int

    @property
    def times(self) -> float:
        """How many times fewer tokens an epoch has than with separate records."""
        return self.num_separate / max(self.num_packed, 1)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"times_fewer": self.times}


@dataclass(frozen=True)
class TokenStats:
    tokenizer: str
    batch: BatchSection
    files: tuple[FileTokens, ...]
    image_tokens: Mapping[int, int]
    """How many distinct images have a given number of tokens; images of unknown size are left out."""
    num_unknown: int
    """Images whose size is unknown, or is refused by the image processor."""

    def to_json(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "batch": self.batch.model_dump(include={"samples_per_step", "tokens_per_pack", "max_tokens"}),
            "files": [encodable(file.to_json()) for file in self.files],
            "image_tokens": asdict(Distribution.of(self.image_tokens))
            | {"images": {str(number): images for number, images in sorted(self.image_tokens.items())}},
            "num_unknown_images": self.num_unknown,
        }


class TokenCounter:
    """Makes examples and counts the tokens of images, for the model in a folder."""

    def __init__(self, folder: Path, max_pixels: int | None = None, enable_thinking: bool | None = None) -> None:
        """Load tokenizer, chat template and image processor settings; weights are not needed.

        Raises:
            ModelError: one of them is missing, or the template does not know `enable_thinking`.
        """
        if not folder.is_dir():
            raise ModelError(f"no folder at {folder}; name one with a model's tokenizer and preprocessor_config.json")
        self.processor = ImageProcessor(folder, max_pixels=max_pixels)
        config = _config(folder, self.processor.settings["merge_size"])
        self.chat_tokenizer = ChatTokenizer(folder, config, enable_thinking=enable_thinking)

    def example(self, record: Record, keys: Sequence[str], image_tokens: Sequence[int]) -> Example:
        """The example that training makes of a record; raises RecordsError if training would refuse it."""
        return Example(*self.chat_tokenizer.shared_tokens(record), tuple(keys), tuple(image_tokens), record.origin)


def count_tokens(corpus: Corpus, counter: TokenCounter, tokenizer: str, batch: BatchSection) -> TokenStats:
    planned = (
        (image.key, planned_tokens(counter.processor, image.size)) for image in corpus.images.values() if image.size
    )
    known = {key: number for key, number in planned if number}
    images = {corpus.identity(path) for path in corpus.images}
    return TokenStats(
        tokenizer,
        batch,
        tuple(_file_tokens(file, corpus, counter, batch, known) for file in corpus.files),
        Counter(known.values()),
        len(images - known.keys()),
    )


def _file_tokens(
    file: CorpusFile, corpus: Corpus, counter: TokenCounter, batch: BatchSection, known: Mapping[str, int]
) -> FileTokens:
    examples, refused = _examples(file, corpus, counter, known)
    kept = [example for example in examples if example.num_tokens <= batch.longest_record]
    too_long = [example for example in examples if example.num_tokens > batch.longest_record]
    sampler = Sampler.of(kept, counter.chat_tokenizer.image_token_id, batch, seed=0)
    pack_lengths = sampler.pack_lengths(0)
    num_image_tokens = sum(sum(example.num_image_tokens) for example in kept)
    num_separate = sum(example.num_tokens for example in kept)
    return FileTokens(
        file=file.name,
        num_records=len(kept),
        too_long=tuple({"place": example.origin, "tokens": example.num_tokens} for example in too_long),
        refused=tuple(refused),
        record_tokens=Distribution.of(Counter(example.num_tokens for example in examples)),
        num_text_tokens=num_separate - num_image_tokens,
        num_image_tokens=num_image_tokens,
        num_supervised=sum(example.num_targets for example in kept),
        num_separate=num_separate,
        num_shared=sum(group.num_tokens for group in sampler.groups),
        num_packed=sum(pack_lengths),
        num_packs=len(pack_lengths),
    )


def _examples(
    file: CorpusFile, corpus: Corpus, counter: TokenCounter, known: Mapping[str, int]
) -> tuple[list[Example], list[Item]]:
    """The examples of all records that training accepts, and the records that it refuses, with the reasons."""
    examples, refused = [], []
    for record in tqdm(file.records, desc=f"count tokens of {file.name}", unit="record", leave=False, disable=None):
        record = replace(record, origin=file.origin(record))
        keys = [corpus.identity(image) for image in record.images]
        try:
            examples.append(counter.example(record, keys, [known.get(key, 0) for key in keys]))
        except RecordsError as error:
            refused.append({"place": record.origin, "reason": str(error)})
    return examples, refused


def _config(folder: Path, merge_size: int) -> Any:
    """The model's configuration if the folder has one; else one that the tokenizer is checked against."""
    if (folder / "config.json").exists():
        family_in(folder)  # refuses others, which may have no image token
        return AutoConfig.from_pretrained(folder)
    config_class: Any = CONFIG_MAPPING[DEFAULT.model_type]
    return config_class(vision_config={"spatial_merge_size": merge_size})


def findings(stats: TokenStats) -> list[Finding]:
    """Records that training would leave out, or stop at."""
    too_long = [item for file in stats.files for item in file.too_long]
    refused = [item for file in stats.files for item in file.refused]
    return [
        *findings_from(
            "refused",
            "error",
            refused,
            f"{count(len(refused), 'record')} that training refuses",
            lambda item: str(item["reason"]),
        ),
        *findings_from(
            "too-long",
            "warning",
            too_long,
            f"{count(len(too_long), 'record')} of more than {stats.batch.longest_record:,} tokens, "
            "which training leaves out",
            lambda item: f"{item['tokens']:,} tokens ({item['place']})",
        ),
    ]


def to_text(stats: TokenStats) -> str:
    """Tables of records, images and epochs."""
    tables = [table(header, lines) for header, lines in _tables(stats)]
    return "\n\n".join([*tables, *([unknown_sizes(stats)] if stats.num_unknown else [])])


def section(stats: TokenStats) -> Section:
    """The same tables for the audit's page, with a plot of tokens per image."""
    says = f"Counted by the code that trains, with {stats.tokenizer}. {unknown_sizes(stats)}"
    return Section("Tokens per image and per epoch", says, _tables(stats), stats.image_tokens, "tokens", "images")


def unknown_sizes(stats: TokenStats) -> str:
    """How images of unknown size were counted; empty if there are none."""
    if not stats.num_unknown:
        return ""
    return f"{count(stats.num_unknown, 'image')} of unknown size counted as no tokens"


def _tables(stats: TokenStats) -> list[Table]:
    distribution = ("mean", "median", "99 %", "most")
    records = [
        (file.file, *_cells(file.record_tokens), f"{file.num_supervised:,}", f"{len(file.too_long):,}")
        for file in stats.files
    ]
    epochs = [
        (
            file.file,
            f"{file.num_separate:,}",
            f"{file.num_shared:,}",
            f"{file.num_packed:,}",
            f"{file.num_packs:,}",
            f"{file.times:.1f}",
        )
        for file in stats.files
    ]
    steps = f"in steps of {stats.batch.samples_per_step}"
    images = [(("tokens per image", *distribution), [("all files", *_cells(Distribution.of(stats.image_tokens)))])]
    return [
        (("tokens per record", *distribution, "supervised in all", "too long"), records),
        *(images if stats.image_tokens else []),
        (("tokens per epoch", "separate", "shared prefix", steps, "packs", "times fewer"), epochs),
    ]


def _cells(numbers: Distribution) -> tuple[str, ...]:
    return f"{numbers.mean:,.1f}", f"{numbers.median:,}", f"{numbers.p99:,}", f"{numbers.max:,}"
