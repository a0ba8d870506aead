"""What a run needs from elsewhere, brought to this machine and looked at, before jobs without internet ask for it.

Design: the model is downloaded to where they will look for it and opened from there as they will open it, without the
Hub. Records are read and images looked for, not read: that is the work of the plan.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.archives import by_archive
from lookonce.errors import LookonceError, ModelError
from lookonce.hub import Download, download_model, is_commit, is_hub_name
from lookonce.run.config import RunFile
from lookonce.run.records import SPLITS, read_split
from lookonce.text import count, rows, size
from lookonce.threads import ahead
from lookonce.train.data.tokenize import Prompter

PREPARE = "lookonce data prepare -h"


@dataclass(frozen=True)
class Split:
    """A split's files, as far as they are here."""

    num_records: int
    num_images: int
    """Files and members of archives that the records name."""
    missing: list[str]
    """Those of the images that are not there; of members of an archive, whose archive is not."""

    def text(self) -> str:
        gone = f", {len(self.missing):,} of them missing" if self.missing else ""
        return f"{count(self.num_records, 'record')} about {count(self.num_images, 'image file')}{gone}"


@dataclass(frozen=True)
class FetchReport:
    """What is here now."""

    model: str
    revision: str | None
    """As the run file says; None for a folder's."""
    commit: str | None
    """That is here of a model of the Hub; None for a folder."""
    is_pinned: bool
    """A folder, or a commit: what the run file names can not become another model."""
    license: str | None
    folder: Path
    num_files: int
    size_bytes: int
    downloaded_bytes: int
    data: dict[str, Split]
    problems: list[str]
    environment: dict[str, str]
    """What jobs without internet need set."""

    def text(self) -> str:
        files = f"{count(self.num_files, 'file')}, {size(self.size_bytes)}"
        new = f"{size(self.downloaded_bytes)} downloaded" if self.downloaded_bytes else "all here before"
        lines = [
            ("model", self.model),
            *([("commit", self.commit), ("licence", self.license or "not stated")] if self.commit else []),
            ("files", f"{files}; {new}" if self.commit else files),
            ("folder", str(self.folder)),
            *((split, found.text()) for split, found in self.data.items()),
        ]
        problems = [f"Not ready: {problem}" for problem in self.problems]
        exports = "\n".join(f"  export {name}={value}" for name, value in self.environment.items())
        return "\n\n".join([rows(lines), *problems, f"In jobs without internet:\n{exports}"])


def fetch(run: RunFile) -> FetchReport:
    """Bring here what is not here, and look at all of it.

    Raises:
        ModelError: the model can not be had, or lacks something.
    """
    found = _fetch_model(run)
    model_folder = ModelFolder.open(run.model.path, run.model.revision, is_local=True)
    ImageProcessor(model_folder.folder, run.cache.backend, run.cache.min_pixels, run.cache.max_pixels)
    Prompter(model_folder.folder, model_folder.config)
    absent = model_folder.absent_files()
    if absent:
        raise ModelError(f"{model_folder.folder} lacks {', '.join(absent)} of its weights; copy or download it again")
    data, problems = _look_at_data(run)
    here = [path for path in model_folder.folder.iterdir() if path.is_file()]
    return FetchReport(
        model=run.model.path,
        revision=run.model.revision if found else None,
        commit=found.commit if found else None,
        is_pinned=found is None or is_commit(run.model.revision),
        license=found.license if found else None,
        folder=model_folder.folder,
        num_files=len(here),
        size_bytes=sum(path.stat().st_size for path in here),
        downloaded_bytes=found.downloaded_bytes if found else 0,
        data=data,
        problems=problems,
        environment=job_environment(),
    )


def _fetch_model(run: RunFile) -> Download | None:
    """None if it is a folder."""
    name = run.model.path
    if Path(name).expanduser().is_dir() or not is_hub_name(name):
        return None
    return download_model(name, run.model.revision)


def _look_at_data(run: RunFile) -> tuple[dict[str, Split], list[str]]:
    data: dict[str, Split] = {}
    problems = []
    for split in SPLITS:
        try:
            found = _look_at_split(run, split)
        except LookonceError as error:
            problems.append(f"{error}; for a known set: {PREPARE}")
            continue
        if found.num_records:
            data[split] = found
        if found.missing:
            number, of = f"{len(found.missing):,}", count(found.num_images, "image file")
            problems.append(
                f"{number} of {of} of data.{split} are missing, the first is {found.missing[0]}; check "
                f"`data.image_root`, or for a known set: {PREPARE}"
            )
    return data, problems


def _look_at_split(run: RunFile, split: str) -> Split:
    records = list(read_split(run, split))
    files, members_of = by_archive(path for record in records for path in record.images)
    missing = [str(path) for path, is_there in zip(files, ahead(os.path.isfile, files), strict=True) if not is_there]
    return Split(len(records), len(files) + sum(map(len, members_of.values())), missing)


def job_environment() -> dict[str, str]:
    """What makes jobs look where this process has looked, and not on the Hub."""
    places = {"HF_HOME": constants.HF_HOME}
    if Path(constants.HF_HUB_CACHE) != Path(constants.HF_HOME) / "hub":
        places["HF_HUB_CACHE"] = constants.HF_HUB_CACHE
    return {**{name: str(Path(place).absolute()) for name, place in places.items()}, "HF_HUB_OFFLINE": "1"}
