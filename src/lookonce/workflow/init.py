"""`lookonce init`: propose a run file from the records and the machine, and write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lookonce.errors import UsageError
from lookonce.files import create_text, write_text
from lookonce.proposal.facts import Facts, find_facts
from lookonce.proposal.run_file import in_yaml, run_file_text
from lookonce.proposal.values import Proposal, propose
from lookonce.run.config import RunFile
from lookonce.settings import explain
from lookonce.text import rows, shell


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
