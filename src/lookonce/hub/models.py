"""Models of the Hub: downloading them, and finding them where there is no internet.

Design: `find_model` asks for the same files as `download_model`, so an incomplete download is recognised. Weights in
other formats than safetensors are not downloaded. The model's card is, for its licence. Both verify the content.
"""

from __future__ import annotations

import contextlib
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

from lookonce.disk_space import check_room
from lookonce.errors import DiskFull, ModelError
from lookonce.hub.names import CARD, FETCH_COMMAND, Download, check_disk, is_hub_name
from lookonce.hub.progress import Progress
from lookonce.hub.verify import verify
from lookonce.text import first_line, located

FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt")
"""The files of a model: weights, configurations, tokenizer, chat template."""


@dataclass(frozen=True)
class ModelDownload(Download):
    """A model of the Hub that is on this machine."""

    downloaded_bytes: int
    """Bytes that were not here before; 0 if the Hub could not be reached."""
    is_verified: bool
    """Whether all its files have the content that the Hub states; False if the Hub could not be asked."""
    refusal: str = ""
    """Why the Hub could not be asked."""


def locate(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of a model: `name` itself, or where the Hub's model of that name is on this machine.

    Raises:
        ModelError: there is none.
    """
    check_name(name)
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else find_model(name, revision, is_local=is_local)


def check_name(name: str) -> None:
    """Check that it is a folder, or has the form of a repository's name; asks no other machine.

    Raises:
        ModelError: it is neither.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and not is_hub_name(name):
        raise ModelError(
            f"no model folder at {located(folder)}; set `model.path` to a folder or to a Hub id (owner/name)"
        )


def find_model(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of a model of the Hub; missing files are downloaded, unless `is_local`.

    Raises:
        ModelError: it is not available, or is not what the Hub states.
    """
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(FILES), local_files_only=is_local)
        if not is_local:
            verify("model", name, Path(folder))
        return Path(folder)
    except LocalEntryNotFoundError as error:
        raise ModelError(_absence(name, revision, error.__cause__)) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        check_disk(error)
        raise ModelError(_refusal(name, revision, error)) from None


def download_model(name: str, revision: str | None) -> ModelDownload:
    """Download the missing files of a model; if the Hub cannot be reached, all must be here.

    Raises:
        ModelError: it is not available, is not what the Hub states, or the disk is too full.
    """
    get: Any = snapshot_download
    wanted = {"repo_id": name, "revision": revision, "allow_patterns": [*FILES, CARD]}
    try:
        files = get(**wanted, dry_run=True, tqdm_class=Progress)
        num_bytes = sum(file.file_size for file in files if file.will_download)
        _check_room(name, num_bytes)
        folder = Path(get(**wanted, tqdm_class=Progress))
    except (DryRunError, LocalEntryNotFoundError) as error:
        folder, num_bytes = _find_offline(wanted | {"local_files_only": True}, error.__cause__), 0
    except (HfHubHTTPError, OSError, ValueError) as error:
        check_disk(error)
        raise ModelError(_refusal(name, revision, error)) from None
    reasons: list[str] = []
    is_verified = verify("model", name, folder, notify=reasons.append)
    return ModelDownload(folder, folder.name, license_of_model(folder), num_bytes, is_verified, *reasons)


def _find_offline(wanted: dict[str, Any], reason: BaseException | None) -> Path:
    """The folder of a model if the Hub cannot be asked; `reason` is why."""
    try:
        return Path(snapshot_download(**wanted))
    except LocalEntryNotFoundError:
        name, revision = wanted["repo_id"], wanted["revision"]
        is_refused = isinstance(reason, RepositoryNotFoundError)
        raise ModelError((_refusal if is_refused else _absence)(name, revision, reason)) from None


def _check_room(name: str, num_bytes: int) -> None:
    place, advice = Path(constants.HF_HUB_CACHE), "Make room, or set HF_HOME to a folder on another disk"
    try:
        check_room(place, num_bytes, f"model {name!r} in {place}", advice)
    except DiskFull as error:
        raise ModelError(str(error)) from None


def _absence(name: str, revision: str | None, reason: BaseException | None) -> str:
    why = f", and the Hub cannot be asked for it ({first_line(reason)})" if reason else ""
    at = f"at revision {revision}" if revision else "at its newest revision (`model.revision` is not set)"
    return (
        f"model {name} {at} is not on this machine, or incomplete{why}; where there is internet run: {FETCH_COMMAND} "
        f"(the folder {Path(name).absolute()} does not exist)"
    )


def _refusal(name: str, revision: str | None, error: BaseException | None) -> str:
    """What is wrong, and what to do about it."""
    if isinstance(error, GatedRepoError):
        return (
            f"model {name!r} requires accepting its licence: do so at https://huggingface.co/{name}, "
            "then: hf auth login"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"model {name!r} has no revision {revision!r}; set `model.revision` to a branch, a tag or a commit of it"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{name!r} is neither a folder in {Path.cwd()} nor a model on the Hub that you may access; "
            "check `model.path`, or if it is private: hf auth login"
        )
    return (
        f"{name!r} is neither a folder in {Path.cwd()} nor available from the Hub ({first_line(error)}); "
        f"check `model.path` and `model.revision`, or where there is internet run: {FETCH_COMMAND}"
    )


def license_of_model(folder: Path) -> str | None:
    """The licence that the card in a model folder names; None if it names none, or there is no card."""
    if not (folder / CARD).is_file():
        return None  # for a path that does not exist, the library would ask the Hub
    with contextlib.suppress(OSError, ValueError):
        data = ModelCard.load(folder / CARD).data
        names = [data.license, getattr(data, "license_name", None), getattr(data, "license_link", None)]
        return ", ".join(str(name) for name in names if name) or None
    return None
