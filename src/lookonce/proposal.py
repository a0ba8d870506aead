"""A first run file: look at the records and the machine, propose values, and write them with their reasons.

Design: a value follows from something stated: the table of GPU memory or the study of step sizes in docs/training.md,
the records, or a default. The reason says which, so that a user can judge it. The training records are all read, since
their order would bias a sample of the questions an image has. So are the images in the rows of parquet files, which may
repeat one in each row: that takes about as long as reading the file. Sizes of images and lengths of texts come from at
most a thousand records, spread over all. The model need not be on this machine: then a byte of text counts as one
token, the most that its tokenizer makes of it.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lookonce.cache.build.progress import planned_tokens
from lookonce.cache.format import STORAGE
from lookonce.checks.inputs import without_thinking
from lookonce.datasets.images import count_images, image_size, read_many
from lookonce.datasets.records import Record
from lookonce.disk_space import free_bytes, with_margin
from lookonce.environment import gpu_gb
from lookonce.errors import ImageError, LookonceError, ModelError, UsageError
from lookonce.families.lookup import family_of
from lookonce.files import create_text, write_text
from lookonce.hub import locate
from lookonce.run.config import RunFile
from lookonce.run.records import read_split
from lookonce.run.sections import UNQUANTISED, BatchSection
from lookonce.settings import explain
from lookonce.text import count, rows, shell, size
from lookonce.train.data.token_stats import TokenCounter
from lookonce.train.model.gpu_memory import Fit, fits, measured_name, peak_gb

NUM_SAMPLED = 1000
PIXELS_PER_TOKEN = 32 * 32
"""Pixels of one visual token of Qwen3-VL."""
IMAGE_TOKENS = (64, 16_384)
"""The fewest and the most tokens of an image by Qwen3-VL's own limits."""
TOKENS_PER_TURN = 32
"""Tokens of the chat template around a question and its answer, where the tokenizer is not known."""


@dataclass(frozen=True)
class Sampled:
    """One of the sampled records."""

    num_text_tokens: int
    image_tokens: tuple[int, ...]
    """Tokens of each of its images that can be read, by the model's own limits."""

    @property
    def num_tokens(self) -> int:
        return self.num_text_tokens + sum(self.image_tokens)


@dataclass(frozen=True)
class Facts:
    """All that the proposals depend on."""

    num_records: int
    num_images: int
    """Images that the training records show: files, members of tar files, and distinct images in parquet files."""
    sampled: tuple[Sampled, ...]
    num_unreadable: int
    """Images of the sampled records that cannot be read."""
    has_tokenizer: bool
    pixels_per_token: int
    measured: str | None
    """The model whose GPU memory was measured and that this one is; None if it is another."""
    bytes_per_token: int | None
    """Bytes of a visual token's features in bfloat16; None if the model is not on this machine."""
    has_linear_attention: bool
    """Whether the model has layers of linear attention; False if it is not on this machine."""
    thinks: bool
    """Whether training needs `enable_thinking: false` for its chat template; False if it is not on this machine."""
    gpu_gb: float | None
    num_cores: int
    free_bytes: int
    """Free bytes where the cache will be."""

    @property
    def samples_per_image(self) -> float:
        return self.num_records / max(self.num_images, 1)

    def cache_bytes(self, max_pixels: int | None) -> int | None:
        """Bytes of all images' features in bfloat16, by the sampled ones; None if the model's shape is not known."""
        limit = max_pixels // self.pixels_per_token if max_pixels else IMAGE_TOKENS[1]
        tokens = [min(number, limit) for one in self.sampled for number in one.image_tokens]
        if self.bytes_per_token is None or not tokens:
            return None
        return round(sum(tokens) / len(tokens) * self.num_images * self.bytes_per_token)


def find_facts(run: RunFile, gpu_memory_gb: float | None = None) -> Facts:
    """Look at the training records of a run, its model and this machine; nothing is downloaded.

    Raises:
        RecordsError: the records cannot be read.
    """
    records = list(read_split(run, "train"))
    config, counter, thinks = _model(run)
    settings = counter.processor.settings if counter else None
    family = None if config is None else family_of(config)
    shape = family.feature_shape(config.vision_config) if family else None
    sample = records[:: max(len(records) // NUM_SAMPLED, 1)][:NUM_SAMPLED]
    tokens, num_unreadable = _image_tokens(sample, counter)
    sampled = tuple(
        Sampled(_text_tokens(record, counter), tuple(tokens[path] for path in record.images if path in tokens))
        for record in sample
    )
    return Facts(
        num_records=len(records),
        num_images=count_images({path for record in records for path in record.images}),
        sampled=sampled,
        num_unreadable=num_unreadable,
        has_tokenizer=counter is not None,
        pixels_per_token=(settings["patch_size"] * settings["merge_size"]) ** 2 if settings else PIXELS_PER_TOKEN,
        measured=measured_name(run.model.path, config),
        bytes_per_token=STORAGE["bfloat16"].bytes_per_token(*shape) if shape else None,
        has_linear_attention=family is not None and "linear_attention" in family.layer_types,
        thinks=thinks,
        gpu_gb=gpu_memory_gb or gpu_gb(),
        num_cores=len(os.sched_getaffinity(0)),
        free_bytes=free_bytes(run.cache.dir),
    )


def _model(run: RunFile) -> tuple[Any, TokenCounter | None, bool]:
    """The configuration and the tokenizer of the model, those that are on this machine; and whether it thinks."""
    from transformers import AutoConfig

    config, counter, told = None, None, None
    with contextlib.suppress(ModelError, OSError, ValueError):
        folder = locate(run.model.path, run.model.revision, is_local=True)
        counter = TokenCounter(folder)
        told = without_thinking(folder, counter)
        config = AutoConfig.from_pretrained(folder)
    return config, told or counter, told is not None


def _image_tokens(records: list[Record], counter: TokenCounter | None) -> tuple[dict[Path, int], int]:
    """The tokens of each image that can be read, and how many cannot."""
    paths = list(dict.fromkeys(path for record in records for path in record.images))
    found = {}
    for path, data in read_many(paths):
        size = None if isinstance(data, ImageError) else image_size(data)
        if size:
            least, most = IMAGE_TOKENS
            by_pixels = min(max(-(-size[0] * size[1] // PIXELS_PER_TOKEN), least), most)
            found[path] = planned_tokens(counter.processor, size) if counter else by_pixels
    return found, len(paths) - len(found)


def _text_tokens(record: Record, counter: TokenCounter | None) -> int:
    try:
        if counter:
            return counter.example(record, [""] * len(record.images), [0] * len(record.images)).num_tokens
    except LookonceError:  # `lookonce check` says what is wrong with it
        pass
    texts = [text for turn in record.turns for text in (turn.question, turn.answer)] + [record.system or ""]
    return sum(len(text.encode()) for text in texts) + TOKENS_PER_TURN * (len(record.turns) + 1)


MEMORY, STEPS = "docs/training.md#memory", "docs/training.md#how-many-samples-a-step"
MOST_TOKENS = 8192
"""The packs of the benchmarks; longer ones were not measured."""
LEAST_TOKENS = 2048
"""The shortest packs whose memory was measured."""
SHARED_STEP = 64
"""Samples of a step in the study of questions that stay together."""
SHARED = 2
"""From this many questions per image on, steps are those of the study."""
MIN_STEPS = 20
"""An epoch has at least this many steps; fewer would say little about the loss."""
LEAST_STEP = 8
"""The smallest step that is proposed for that reason."""
KEPT = 0.99
"""Share of the records that must fit when images are shrunk."""


@dataclass(frozen=True)
class Proposal:
    """A value for a key of the run file."""

    key: str
    """The key with its section: "batch.tokens_per_pack"."""
    value: Any
    """None for a key that is left at its default, whose reason is written all the same."""
    reason: str


def propose(facts: Facts) -> list[Proposal]:
    """All proposals, in the order of the run file."""
    memory = list(_memory(facts))
    tokens = next(one.value for one in memory if one.key == "batch.tokens_per_pack")
    pixels = _max_pixels(facts, min(tokens, BatchSection().max_tokens))
    found = [pixels, _dtype(facts, pixels.value)]
    if facts.thinks:
        reason = "else the chat template lets the model think before it answers, and training refuses all records"
        found.insert(0, Proposal("data.enable_thinking", False, f"{reason}; docs/models.md#thinking"))
    if facts.has_linear_attention:
        reason = "the default targets name none of the matrices of linear attention; docs/models.md"
        found.append(Proposal("lora.targets", "all-linear", reason))
    return [*found, _samples_per_step(facts), *memory]


def _memory(facts: Facts) -> Iterator[Proposal]:
    key, default = "batch.tokens_per_pack", BatchSection().tokens_per_pack
    name, gpu_gb = facts.measured, facts.gpu_gb
    if gpu_gb is None:
        yield Proposal(key, default, f"the default: no GPU is on this machine and --gpu-memory was not given; {MEMORY}")
        return
    if name is None:
        yield Proposal(key, default, f"the default: the memory of this model was not measured; {MEMORY} has others")
        return
    fit = next((one for one in fits(name, gpu_gb) if one.num_tokens >= LEAST_TOKENS), None)
    if fit:
        value = min(fit.num_tokens, MOST_TOKENS)
        most = f", and the benchmarks have {value:,}" if fit.num_tokens > value else ""
        how = f" with {keys}" if (keys := fit.text(UNQUANTISED, False)) else ""
        yield Proposal(key, value, f"{name}{how} fits {fit.num_tokens:,} in {gpu_gb:.0f} GB ({MEMORY}){most}")
        yield from _sparing(fit, f"without it, {name} fits no packs of {LEAST_TOKENS:,} in {gpu_gb:.0f} GB; {MEMORY}")
        return
    fit = Fit("nf4", True, LEAST_TOKENS)
    need = f"{name} needs about {peak_gb(name, fit.num_tokens, fit.checkpointing, fit.frozen):.0f} GB and some to spare"
    advice = f"this GPU has {gpu_gb:.0f}: take a smaller model; {MEMORY}"
    yield Proposal(key, fit.num_tokens, f"even so, {need}, and {advice}")
    yield from _sparing(fit, "less memory, for slower steps")


def _sparing(fit: Fit, reason: str) -> Iterator[Proposal]:
    if fit.checkpointing:
        yield Proposal("train.gradient_checkpointing", fit.checkpointing, reason)
    if fit.frozen != UNQUANTISED:
        yield Proposal("train.frozen", fit.frozen, f"{reason}; needs: pip install 'lookonce[qlora]'")


def _samples_per_step(facts: Facts) -> Proposal:
    key, default, each = "batch.samples_per_step", BatchSection().samples_per_step, facts.samples_per_image
    shown = f"{each:.1f} questions per image"
    value, reason = default, f"the default; the records have {shown}"
    if each >= SHARED:
        value, reason = SHARED_STEP, f"with {shown}, steps larger than usual; {STEPS}"
    while value > LEAST_STEP and facts.num_records < value * MIN_STEPS:
        value //= 2
        reason = f"more, and an epoch of {facts.num_records:,} records would have less than {MIN_STEPS} steps"
    return Proposal(key, value, reason)


def _max_pixels(facts: Facts, limit: int) -> Proposal:
    key = "cache.max_pixels"
    longest = max((one.num_tokens for one in facts.sampled), default=0)
    counted = "" if facts.has_tokenizer else "; a byte of text counts as a token, as the model is not on this machine"
    if longest <= limit:
        return Proposal(key, None, f"the longest record has {longest:,} tokens, and {limit:,} fit{counted}")
    wanted = [
        (limit - one.num_text_tokens) // len(one.image_tokens)
        for one in facts.sampled
        if one.image_tokens and one.num_text_tokens < limit
    ]
    tokens = max(sorted(wanted)[int((1 - KEPT) * len(wanted))] if wanted else 1, 1)
    reason = f"so that {KEPT:.0%} of the records fit {limit:,} tokens; the longest has {longest:,}{counted}"
    return Proposal(key, tokens * facts.pixels_per_token, reason)


def _dtype(facts: Facts, max_pixels: int | None) -> Proposal:
    key, needed, free = "cache.dtype", facts.cache_bytes(max_pixels), size(facts.free_bytes)
    if needed is None:
        return Proposal(key, None, f"{free} are free, and `lookonce cache plan` says what bfloat16 needs")
    if with_margin(needed) <= facts.free_bytes:
        return Proposal(key, None, f"bfloat16 needs about {size(needed)}, and {free} are free")
    return Proposal(key, "fp8_e4m3", f"half of bfloat16, which needs about {size(needed)} where {free} are free")


NO_VAL = (
    "no validation records: there will be no validation loss, and nothing is evaluated after training; split them by "
    "image with `lookonce data prepare SET.yaml DIR --source RECORDS`, and name its val.jsonl as data.val"
)


def run_file_text(given: Mapping[str, Any], facts: Facts, proposals: Sequence[Proposal]) -> str:
    """The run file. `given` are the user's values by key ("data.train"), without those that are None."""
    gpu = f"a GPU of {facts.gpu_gb:.0f} GB" if facts.gpu_gb else "no GPU"
    machine = f"{count(facts.num_cores, 'CPU core')}, {gpu}, {size(facts.free_bytes)} free"
    records = f"{count(facts.num_records, 'training record')} about {count(facts.num_images, 'image')}"
    lines = [
        "# Written by `lookonce init`. Check it with `lookonce check`; docs/run-file.md has all keys.",
        *_comment(f"Proposed from {records} ({facts.samples_per_image:.1f} each), for {machine}."),
    ]
    for section in ("model", "data", "cache", "lora", "batch", "train"):
        own = [one for one in proposals if one.key.startswith(f"{section}.")]
        lines += [line for one in own if one.value is None for line in _comment(f"{one.key} is not set: {one.reason}")]
        lines += _comment(f"data.val is not set: {NO_VAL}") if section == "data" and "data.val" not in given else []
        keys = [f"{_name(key)}: {in_yaml(value)}" for key, value in given.items() if key.startswith(f"{section}.")]
        for one in own:
            if one.value is not None:
                name = _name(one.key)
                keys += [*_comment(f"{name}: {one.reason}"), f"{name}: {in_yaml(one.value)}"]
        lines += [f"{section}:", *(f"  {line}" for line in keys)] if keys else []
    return "\n".join([*lines, f"output: {in_yaml(given['output'])}", ""])


def _name(key: str) -> str:
    return key.partition(".")[2]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 100)]


def in_yaml(value: Any) -> str:
    """A value as YAML, on one line; a list of one path is that path."""
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


@dataclass(frozen=True)
class Written:
    """A run file that was written."""

    path: Path
    facts: Facts
    proposals: list[Proposal]

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self.facts).items() if name != "sampled"}
        return {"run_file": str(self.path), "facts": facts, "proposals": [asdict(one) for one in self.proposals]}

    def text(self) -> str:
        set_keys = [(one.key, in_yaml(one.value)) for one in self.proposals if one.value is not None]
        lines = [f"wrote {self.path}; its comments say why each value was proposed", rows(set_keys)]
        if self.facts.num_unreadable:
            lines.append(f"  {self.facts.num_unreadable:,} of the sampled images cannot be read")
        return "\n".join([*lines, "", f"next: {shell('lookonce', 'check', self.path)}"])


def init(path: Path, given: Mapping[str, Any], gpu_memory_gb: float | None = None, *, force: bool = False) -> Written:
    """Write a run file to `path`. `given` are values by key: "model.path", "data.train", ..., "output".

    Raises:
        UsageError: the file exists and `force` is not set, or a given value is not allowed.
        RecordsError: the training records cannot be read.
    """
    refuse_existing(path, force)
    facts = find_facts(_run(given), gpu_memory_gb)
    proposals = propose(facts)
    text = run_file_text(given, facts, proposals)
    RunFile.model_validate(yaml.safe_load(text))  # our own invariant: what is written is a run file
    if force:
        write_text(path, text)
    elif not create_text(path, text):
        refuse_existing(path, force)
    return Written(path, facts, proposals)


def refuse_existing(path: Path, force: bool) -> None:
    """Check that a file may be written.

    Raises:
        UsageError: it exists, and `force` is not set.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists; name another file, or replace it with --force")


def _run(given: Mapping[str, Any]) -> RunFile:
    """The run of the given values alone."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    try:
        return RunFile.model_validate(values)
    except ValidationError as error:
        problems = "\n".join(f"  {explain(problem, RunFile)}" for problem in error.errors())
        raise UsageError(f"the given values are wrong:\n{problems}") from None
