"""Models on the Hugging Face Hub: what of one is needed, downloading it, and finding it where there is no internet.

Design: huggingface_hub keeps them, in the folder that HF_HOME names, and finds offline what was downloaded online: a
commit by itself, a branch or tag as it stood then. What is asked for here and what is downloaded are the same files, so
a download that was cut short is told from a whole one. Weights in other formats than safetensors are left there. The
model's card comes along, for its licence.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from lookonce.errors import ModelError
from lookonce.text import first_line, size

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
"""That make a model: weights, configurations, tokenizer, chat template."""
CARD = "README.md"
FETCH_COMMAND = "lookonce fetch RUN.yaml"


@dataclass(frozen=True)
class Download:
    """A model of the Hub that is on this machine."""

    folder: Path
    commit: str
    num_files: int
    size_bytes: int
    downloaded_bytes: int
    """Of these, not here before; 0 where the Hub could not be asked."""
    license: str | None
    """As the model's card says; None if it does not."""


def is_hub_name(name: str) -> bool:
    """Whether it has the form of a model's name on the Hub, owner/name."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))


def is_commit(revision: str | None) -> bool:
    """Whether a revision means the same files for ever; branches and tags may be moved."""
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision or ""))


def locate(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of a model: `name` itself, or where the Hub's model of that name lies.

    Raises:
        ModelError: there is none.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_name(name):
        raise ModelError(
            f"no model folder at {folder.absolute()}; set `model.path` to a folder or to a Hub id (owner/name)"
        )
    return find_model(name, revision, is_local=is_local)


def find_model(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of a model; what of it is not here is downloaded, unless `is_local`.

    Raises:
        ModelError: it can not be had.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES), local_files_only=is_local))
    except LocalEntryNotFoundError as error:
        raise ModelError(_absence(name, revision, error.__cause__)) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_refusal(name, revision, error)) from None


def download_model(name: str, revision: str | None) -> Download:
    """Download what of a model is not here, with progress bars; where the Hub can not be reached, all must be here.

    Raises:
        ModelError: it can not be had, or there is no room for it.
    """
    get: Any = snapshot_download
    wanted = {"repo_id": name, "revision": revision, "allow_patterns": [*FILES, CARD]}
    try:
        files = get(**wanted, dry_run=True, tqdm_class=_Silent)
        num_bytes = sum(file.file_size for file in files if file.will_download)
        _check_room(name, num_bytes)
        folder = Path(get(**wanted, tqdm_class=_Bar))
    except (DryRunError, LocalEntryNotFoundError) as error:
        folder, num_bytes = _already_here(wanted | {"local_files_only": True}, error.__cause__), 0
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_refusal(name, revision, error)) from None
    here = [path for path in folder.iterdir() if path.is_file()]
    return Download(
        folder, folder.name, len(here), sum(path.stat().st_size for path in here), num_bytes, _license(folder)
    )


def _already_here(wanted: dict[str, Any], reason: BaseException | None) -> Path:
    """The folder of a model that the Hub can not be asked for, for that reason."""
    try:
        return Path(snapshot_download(**wanted))
    except LocalEntryNotFoundError:
        name, revision = wanted["repo_id"], wanted["revision"]
        is_refused = isinstance(reason, RepositoryNotFoundError)
        raise ModelError((_refusal if is_refused else _absence)(name, revision, reason)) from None


class _Bar(tqdm):  # type: ignore[type-arg]
    """Shown on a terminal, also where the libraries' own bars are switched off."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"disable": None, **options})


class _Silent(tqdm):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _absence(name: str, revision: str | None, reason: BaseException | None) -> str:
    why = f", and the Hub can not be asked for it ({first_line(reason)})" if reason else ""
    at = f"at revision {revision}" if revision else "at its newest revision (`model.revision` is not set)"
    return (
        f"model {name} {at} is not on this machine, or not all of it{why}; where there is internet run: {FETCH_COMMAND}"
    )


def _refusal(name: str, revision: str | None, error: BaseException | None) -> str:
    """What is wrong, and what to do about it."""
    if isinstance(error, GatedRepoError):
        return (
            f"model {name!r} is only given to those who accept its licence: do so at https://huggingface.co/{name}, "
            "then: hf auth login"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"model {name!r} has no revision {revision!r}; set `model.revision` to a branch, a tag or a commit of it"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{name!r} is neither a folder here nor a model on the Hub that you may see; check `model.path`, "
            "or if it is private: hf auth login"
        )
    return (
        f"{name!r} is neither a folder here nor a model that could be had from the Hub ({first_line(error)}); "
        f"check `model.path` and `model.revision`, or where there is internet run: {FETCH_COMMAND}"
    )


def _check_room(name: str, num_bytes: int) -> None:
    place = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (place, *place.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise ModelError(
            f"model {name!r} needs {size(num_bytes)} in {place}, where {size(free)} are free; "
            "make room, or set HF_HOME to a folder on another disk"
        )


def _license(folder: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        data = ModelCard.load(folder / CARD).data
        names = [data.license, getattr(data, "license_name", None), getattr(data, "license_link", None)]
        return ", ".join(str(name) for name in names if name) or None
    return None
