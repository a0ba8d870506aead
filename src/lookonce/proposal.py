"""A first run file: look at the records, the model and the GPU, propose values, and write them with their reasons.

Design: a value follows from something stated: the table of GPU memory or the study of step sizes in docs/training.md,
the number of questions an image has, or what the model needs. The reason says which. What depends on the lengths of
records and the sizes of images is left at its default. Images in the rows of parquet files are all read, to tell how
many are distinct.
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

from lookonce.checks.inputs import without_thinking
from lookonce.datasets.images import count_images
from lookonce.environment import gpu_gb
from lookonce.errors import ModelError, UsageError
from lookonce.families.lookup import family_of
from lookonce.files import create_text, write_text
from lookonce.hub import locate
from lookonce.run.config import RunFile
from lookonce.run.records import read_split
from lookonce.run.sections import UNQUANTISED, BatchSection
from lookonce.settings import checked
from lookonce.text import count, rows, shell
from lookonce.train.data.token_stats import TokenCounter
from lookonce.train.model.gpu_memory import Fit, fits, measured_name, peak_gb


@dataclass(frozen=True)
class Facts:
    num_records: int
    num_images: int
    """Images that the training records show: files, members of tar files, and distinct images in parquet files."""
    measured: str | None
    """The model whose GPU memory was measured and that this one is; None if it is another."""
    has_linear_attention: bool
    """Whether the model has layers of linear attention; False if it is not on this machine."""
    thinks: bool
    """Whether training needs `enable_thinking: false` for its chat template; False if it is not on this machine."""
    gpu_gb: float | None

    @property
    def samples_per_image(self) -> float:
        return self.num_records / max(self.num_images, 1)


def find_facts(run: RunFile, gpu_memory_gb: float | None = None) -> Facts:
    """Look at training records, model and machine, offline; raises RecordsError if records cannot be read."""
    from transformers import AutoConfig

    records = list(read_split(run, "train"))
    config, thinks = None, False
    with contextlib.suppress(ModelError, OSError, ValueError):
        folder = locate(run.model.path, run.model.revision, is_local=True)
        config = AutoConfig.from_pretrained(folder)
        thinks = without_thinking(folder, TokenCounter(folder)) is not None
    family = None if config is None else family_of(config)
    return Facts(
        num_records=len(records),
        num_images=count_images({path for record in records for path in record.images}),
        measured=measured_name(run.model.path, config),
        has_linear_attention=family is not None and "linear_attention" in family.layer_types,
        thinks=thinks,
        gpu_gb=gpu_memory_gb or gpu_gb(),
    )


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


@dataclass(frozen=True)
class Proposal:
    key: str
    """The key with its section: "batch.tokens_per_pack"."""
    value: Any
    reason: str


def propose(facts: Facts) -> list[Proposal]:
    proposals = []
    if facts.thinks:
        reason = "else the chat template lets the model think before it answers, and training refuses all records"
        proposals.append(Proposal("data.enable_thinking", False, f"{reason}; docs/models.md#thinking"))
    if facts.has_linear_attention:
        reason = "the default targets name none of the matrices of linear attention; docs/models.md"
        proposals.append(Proposal("lora.targets", "all-linear", reason))
    return [*proposals, _samples_per_step(facts), *_memory(facts)]


def _memory(facts: Facts) -> Iterator[Proposal]:
    key, default = "batch.tokens_per_pack", BatchSection().tokens_per_pack
    name, gpu_gb = facts.measured, facts.gpu_gb
    if gpu_gb is None:
        yield Proposal(key, default, f"the default: no GPU is on this machine and --gpu-memory was not given; {MEMORY}")
        return
    if name is None:
        yield Proposal(
            key, default, f"the default: the memory of this model was not measured; {MEMORY} lists the models that were"
        )
        return
    fit = next((fit for fit in fits(name, gpu_gb) if fit.num_tokens >= LEAST_TOKENS), None)
    if fit:
        value = min(fit.num_tokens, MOST_TOKENS)
        most = f", and the benchmarks use {value:,}" if fit.num_tokens > value else ""
        how = f" with {keys}" if (keys := fit.text(UNQUANTISED, False)) else ""
        yield Proposal(
            key, value, f"{name}{how} fits packs of {fit.num_tokens:,} tokens in {gpu_gb:.0f} GB ({MEMORY}){most}"
        )
        yield from _sparing(
            fit, f"without it, {name} fits no packs of {LEAST_TOKENS:,} tokens in {gpu_gb:.0f} GB; {MEMORY}"
        )
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
        reason = f"with more, an epoch of {facts.num_records:,} records would have fewer than {MIN_STEPS} steps"
    return Proposal(key, value, reason)


NO_VAL = (
    "no validation records: there will be no validation loss, and nothing is evaluated after training; split them by "
    "image with `lookonce data prepare SET.yaml DIR --source RECORDS`, and name its val.jsonl as data.val"
)


def run_file_text(chosen: Mapping[str, Any], facts: Facts, proposals: Sequence[Proposal]) -> str:
    """The run file. `chosen` are the user's values by key ("data.train"), without those that are None."""
    machine = f"a GPU of {facts.gpu_gb:.3g} GB" if facts.gpu_gb else "a machine without a GPU"
    records = f"{count(facts.num_records, 'training record')} with {count(facts.num_images, 'image')}"
    lines = [
        "# Written by `lookonce init`. Check it with `lookonce check`; docs/run-file.md has all keys.",
        *_comment(f"Proposed from {records} ({facts.samples_per_image:.1f} each), for {machine}."),
    ]
    for section in ("model", "data", "cache", "lora", "batch", "train"):
        lines += (
            _comment(f"data.val is not set, so there are {NO_VAL}")
            if section == "data" and "data.val" not in chosen
            else []
        )
        here = f"{section}."
        keys = [f"{key.removeprefix(here)}: {in_yaml(value)}" for key, value in chosen.items() if key.startswith(here)]
        for proposal in (proposal for proposal in proposals if proposal.key.startswith(here)):
            name = proposal.key.removeprefix(here)
            keys += [*_comment(f"{name}: {proposal.reason}"), f"{name}: {in_yaml(proposal.value)}"]
        lines += [f"{section}:", *(f"  {line}" for line in keys)] if keys else []
    return "\n".join([*lines, f"output: {in_yaml(chosen['output'])}", ""])


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, 100)]


def in_yaml(value: Any) -> str:
    """A value as YAML, on one line; a list of one path is that path."""
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()


@dataclass(frozen=True)
class Written:
    path: Path
    facts: Facts
    proposals: list[Proposal]

    def to_json(self) -> dict[str, Any]:
        proposals = [asdict(proposal) for proposal in self.proposals]
        return {"run_file": str(self.path), "facts": asdict(self.facts), "proposals": proposals}

    def text(self) -> str:
        proposed = rows([(proposal.key, in_yaml(proposal.value)) for proposal in self.proposals])
        wrote = f"wrote {self.path}; its comments say why each value was proposed"
        return f"{wrote}\n{proposed}\n\nnext: {shell('lookonce', 'check', self.path)}"


def init(path: Path, chosen: Mapping[str, Any], gpu_memory_gb: float | None = None, *, force: bool = False) -> Written:
    """Write a run file to `path`. `chosen` are values by key: "model.path", "data.train", ..., "output".

    Raises:
        UsageError: the file exists and `force` is not set, or a given value is not allowed.
        RecordsError: the training records cannot be read.
    """
    facts = find_facts(_run(chosen), gpu_memory_gb)
    proposals = propose(facts)
    text = run_file_text(chosen, facts, proposals)
    RunFile.model_validate(yaml.safe_load(text))  # our own invariant: what is written is a run file
    if force:
        write_text(path, text)
    elif not create_text(path, text):
        refuse_existing(path, force)
    return Written(path, facts, proposals)


def refuse_existing(path: Path, force: bool) -> None:
    """Check that a file may be written; raises UsageError if it exists, and `force` is not set."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it, such as {path / 'run.yaml'}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists; name another file, or replace it with --force")


def _run(chosen: Mapping[str, Any]) -> RunFile:
    values: dict[str, Any] = {}
    for name, value in chosen.items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    return checked(values, RunFile, "the run of the given values")
