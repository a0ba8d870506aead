"""A run file as text, with the reason of each proposed value as a comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from lookonce.proposal.facts import Facts
from lookonce.proposal.values import Proposal
from lookonce.text import count, size

WIDTH = 100
NO_VAL = (
    "no validation records: there will be no validation loss, and nothing is evaluated after training; split them by "
    "image with `lookonce data convert ... --split val=0.1`, and name the new file as data.val"
)
SECTIONS = ("model", "data", "cache", "lora", "batch", "train")


def run_file_text(given: Mapping[str, Any], facts: Facts, proposals: Sequence[Proposal]) -> str:
    """The run file. `given` are the user's values by key ("data.train"), without those that are None."""
    lines = [
        "# Written by `lookonce init`. Check it with `lookonce check`; docs/run-file.md has all keys.",
        *_comment(_seen(facts)),
    ]
    for section in SECTIONS:
        own = [one for one in proposals if one.key.startswith(f"{section}.")]
        lines += [line for one in own if one.value is None for line in _comment(f"{one.key} is not set: {one.reason}")]
        lines += _comment(f"data.val is not set: {NO_VAL}") if section == "data" and "data.val" not in given else []
        keys = [
            *(f"{_name(key)}: {in_yaml(value)}" for key, value in given.items() if key.startswith(f"{section}.")),
            *(line for one in own if one.value is not None for line in _lines(one)),
        ]
        lines += [f"{section}:", *(f"  {line}" for line in keys)] if keys else []
    return "\n".join([*lines, f"output: {in_yaml(given['output'])}", ""])


def _seen(facts: Facts) -> str:
    gpu = f"a GPU of {facts.gpu_gb:.0f} GB" if facts.gpu_gb else "no GPU"
    machine = f"{count(facts.num_cores, 'CPU core')}, {gpu}, {size(facts.free_bytes)} free"
    return (
        f"Proposed from {count(facts.num_records, 'training record')} about {count(facts.num_images, 'image')} "
        f"({facts.samples_per_image:.1f} each), for {machine}."
    )


def _lines(proposal: Proposal) -> Iterator[str]:
    name = _name(proposal.key)
    yield from _comment(f"{name}: {proposal.reason}")
    yield f"{name}: {in_yaml(proposal.value)}"


def _name(key: str) -> str:
    return key.partition(".")[2]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH)]


def in_yaml(value: Any) -> str:
    """A value as YAML, on one line; a list of one path is that path."""
    if isinstance(value, list) and len(value) == 1:
        [value] = value
    return yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()
