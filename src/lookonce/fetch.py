"""Download a run's model and the adapter that it starts from, and check its records and images: for later jobs, which
may have no internet.

Design: model and adapter are opened as jobs do, without the Hub. Images are only checked for existence, because the
plan reads them. A commit is written into the run file so that all its other text stays: PyYAML says where each value
stands, so only that value is replaced, or one line added. The result is parsed again and must differ in that key alone,
otherwise nothing is written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.archives import by_archive
from lookonce.errors import LookonceError, ModelError, UsageError
from lookonce.files import threaded_map, write_text
from lookonce.hub import download_model, find_adapter, is_commit, is_hub_name
from lookonce.run.config import RunFile
from lookonce.run.records import SPLITS, read_split
from lookonce.run.sections import HubAdapter, hub_adapter
from lookonce.run.start_adapter import find_start
from lookonce.text import count, rows, shell, size
from lookonce.train.data.tokenize import ChatTokenizer

PREPARE = "lookonce data prepare -h"


@dataclass(frozen=True)
class Split:
    """How many records and images a split has, and which images are missing."""

    num_records: int
    num_images: int
    """Image files and archive members that the records name."""
    missing: list[str]
    """Missing image files, and missing archives for their members."""

    def text(self) -> str:
        gone = f", {len(self.missing):,} of them missing" if self.missing else ""
        return f"{count(self.num_records, 'record')} with {count(self.num_images, 'image file')}{gone}"


@dataclass(frozen=True)
class FetchReport:
    model: str
    revision: str | None
    """`model.revision` of the run file; None for a model folder."""
    commit: str | None
    """The commit of a Hub model on this machine; None for a model folder."""
    is_pinned: bool
    """Whether the run file names a folder or a commit, so that it always means the same model."""
    license: str | None
    folder: Path
    num_files: int
    size_bytes: int
    downloaded_bytes: int
    is_verified: bool | None
    """Whether all files have the content that the Hub states; False if it is unreachable, None for a model folder."""
    data: dict[str, Split]
    problems: list[str]
    environment: dict[str, str]
    start: str | None = None
    """The adapter on the Hub that the training starts from, its commit included; None without one."""
    refusal: str = ""
    """Why the Hub could not be reached to verify the contents of the model's files."""
    is_start_pinned: bool = True
    """Whether the run file names that commit."""

    def text(self) -> str:
        files = f"{count(self.num_files, 'file')}, {size(self.size_bytes)}"
        new = f"{size(self.downloaded_bytes)} downloaded" if self.downloaded_bytes else "nothing to download"
        refused = f"contents not verified, because the Hub cannot be reached ({self.refusal})"
        verified = "contents verified" if self.is_verified else refused
        lines = [
            ("model", self.model),
            *([("commit", self.commit), ("licence", self.license or "not stated")] if self.commit else []),
            ("files", f"{files}; {new}; {verified}" if self.commit else files),
            ("folder", str(self.folder)),
            *([("starts from", self.start)] if self.start else []),
            *((split, facts.text()) for split, facts in self.data.items()),
        ]
        problems = [f"Not ready: {problem}" for problem in self.problems]
        exports = "\n".join(f"  export {name}={shell(value)}" for name, value in self.environment.items())
        return "\n\n".join([rows(lines), *problems, f"For jobs without internet, set:\n{exports}"])


def fetch(run: RunFile) -> FetchReport:
    """Download the model unless it is here; check it, records and images; raises ModelError if it is not complete."""
    is_folder = Path(run.model.path).expanduser().is_dir() or not is_hub_name(run.model.path)
    download = None if is_folder else download_model(run.model.path, run.model.revision)
    model_folder = ModelFolder.open(run.model.path, run.model.revision, is_local=True)
    ImageProcessor(model_folder.folder, run.cache.backend, run.cache.min_pixels, run.cache.max_pixels)
    ChatTokenizer(model_folder.folder, model_folder.config, enable_thinking=run.data.enable_thinking)
    absent = model_folder.absent_files()
    if absent:
        raise ModelError(f"{model_folder.folder} lacks {', '.join(absent)} of its weights; copy or download it again")
    start = _fetch_start(run)
    data, problems = _check_data(run)
    here = [path for path in model_folder.folder.iterdir() if path.is_file()]
    return FetchReport(
        model=run.model.path,
        revision=run.model.revision if download else None,
        commit=download.commit if download else None,
        is_pinned=download is None or is_commit(run.model.revision),
        license=download.license if download else None,
        folder=model_folder.folder,
        num_files=len(here),
        size_bytes=sum(path.stat().st_size for path in here),
        downloaded_bytes=download.downloaded_bytes if download else 0,
        is_verified=download.is_verified if download else None,
        refusal=download.refusal if download else "",
        data=data,
        problems=problems,
        environment=job_environment(),
        start=str(start) if start else None,
        is_start_pinned=start is None or str(start) == str(run.train.start_from),
    )


def _fetch_start(run: RunFile) -> HubAdapter | None:
    """Download the adapter on the Hub that the training starts from, and check its shape; None without one.

    Raises:
        ModelError: it cannot be downloaded.
        UsageError: it has another shape than the run's own, or no record of a run.
    """
    named = hub_adapter(run.train.start_from)
    if named is None:
        return None
    start = HubAdapter(named.name, find_adapter(named.name, named.revision).name)
    find_start(run.model_copy(update={"train": run.train.model_copy(update={"start_from": str(start)})}))
    return start


def _check_data(run: RunFile) -> tuple[dict[str, Split], list[str]]:
    data: dict[str, Split] = {}
    problems = []
    for split in SPLITS:
        try:
            facts = _check_split(run, split)
        except LookonceError as error:
            problems.append(f"{error}; for a known dataset: {PREPARE}")
            continue
        if facts.num_records:
            data[split] = facts
        if facts.missing:
            number, total = f"{len(facts.missing):,}", count(facts.num_images, "image file")
            problems.append(
                f"{number} of {total} of data.{split} are missing, the first is {facts.missing[0]}; check "
                f"`data.image_root`, or for a known dataset: {PREPARE}"
            )
    return data, problems


def _check_split(run: RunFile, split: str) -> Split:
    records = list(read_split(run, split))
    files, members_of = by_archive(path for record in records for path in record.images)
    are_here = zip(files, threaded_map(os.path.isfile, files), strict=True)
    missing = [str(path) for path, is_here in are_here if not is_here]
    return Split(len(records), len(files) + sum(map(len, members_of.values())), missing)


def job_environment() -> dict[str, str]:
    """Environment variables that make jobs use the model cache of this process, and not the Hub."""
    folders = {"HF_HOME": constants.HF_HOME}
    if Path(constants.HF_HUB_CACHE) != Path(constants.HF_HOME) / "hub":
        folders["HF_HUB_CACHE"] = constants.HF_HUB_CACHE
    return {**{name: str(Path(folder).absolute()) for name, folder in folders.items()}, "HF_HUB_OFFLINE": "1"}


def pin(run_file: Path, section: str, key: str, value: str) -> bool:
    """Set a text in a section of a run file, and change nothing else in it; False if it is set to this already.

    Raises:
        UsageError: the section is shared by an alias or merged from another, so it cannot be edited alone.
    """
    text = run_file.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    new_values = {**values, section: {**(values.get(section) or {}), key: value}}
    if values == new_values:
        return False
    try:
        pinned = _with_value(text, section, key, value)
        is_correct = yaml.safe_load(pinned) == new_values
    except (LookupError, ValueError, yaml.YAMLError):  # a section that is merged from elsewhere, absent or there twice
        is_correct = False
    if not is_correct:
        raise UsageError(f'cannot edit {run_file}; set in its section `{section}` by hand: {key}: "{value}"')
    write_text(run_file, pinned)
    return True


def _with_value(text: str, section: str, key: str, value: str) -> str:
    root: Any = yaml.compose(text)
    [section_node] = [node for name, node in root.value if name.value == section]
    nodes = {name.value: node for name, node in section_node.value}
    if key in nodes:
        start, end = nodes[key].start_mark.index, nodes[key].end_mark.index
        return f'{text[:start]}{" " if start == end else ""}"{value}"{text[end:]}'  # an empty value stands at the colon
    first, its_value = section_node.value[0]
    end = its_value.end_mark.index
    if section_node.flow_style:
        return f'{text[:end]}, {key}: "{value}"{text[end:]}'
    end = text.find("\n", end) if "\n" in text[end:] else len(text)  # after a comment on the line
    return f'{text[:end]}\n{" " * first.start_mark.column}{key}: "{value}"{text[end:]}'
