"""Models and datasets on the Hugging Face Hub: downloading them, and finding models where there is no internet.

Design: huggingface_hub keeps the files in the folder that HF_HOME names, where other tools find them, and resumes
interrupted downloads. Offline it finds what was downloaded online: a commit by its hash, a branch or tag as it was
then. `find_model` asks for the same files as `download_model`, so an incomplete download is recognised. Weights in
other formats than safetensors are not downloaded. The model's card is, for its licence. A dataset is always downloaded
at a commit, never at a branch: without a revision, at the commit that `main` is now.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, constants, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from lookonce.disk_space import check_room
from lookonce.errors import DiskFull, ModelError, SourceError
from lookonce.text import first_line, located

FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
"""The files of a model: weights, configurations, tokenizer, chat template."""
CARD = "README.md"
ADAPTER_FILES = ["adapter_model.safetensors", "adapter_config.json", "run.json", "trained.json"]
"""The files of an uploaded adapter that a training starts from: weights, shape, and the record of the run."""
DATASET_INFO = (CARD, "LICENSE*")
"""Files of a dataset that are always downloaded with it."""
FETCH_COMMAND = "lookonce fetch RUN.yaml"
PROGRESS_DELAY_S = 1.0


@dataclass(frozen=True)
class Download:
    """Files of a repository on the Hub that are on this machine."""

    folder: Path
    commit: str
    license: str | None
    """The licence that the card names; None if it names none."""


@dataclass(frozen=True)
class ModelDownload(Download):
    """A model of the Hub that is on this machine."""

    downloaded_bytes: int
    """Bytes that were not here before; 0 if the Hub could not be reached."""


def is_hub_name(name: str) -> bool:
    """Whether it has the form of a repository's name on the Hub, owner/name."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))


def is_commit(revision: str | None) -> bool:
    """Whether a revision always means the same files; branches and tags may be moved."""
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision or ""))


# Models.


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
        ModelError: it is not available.
    """
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES), local_files_only=is_local))
    except LocalEntryNotFoundError as error:
        raise ModelError(_absence(name, revision, error.__cause__)) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_refusal(name, revision, error)) from None


def download_model(name: str, revision: str | None) -> ModelDownload:
    """Download the missing files of a model; if the Hub cannot be reached, all must be here.

    Raises:
        ModelError: it is not available, or the disk is too full.
    """
    get: Any = snapshot_download
    wanted = {"repo_id": name, "revision": revision, "allow_patterns": [*FILES, CARD]}
    try:
        files = get(**wanted, dry_run=True, tqdm_class=_Progress)
        num_bytes = sum(file.file_size for file in files if file.will_download)
        _check_room(name, num_bytes)
        folder = Path(get(**wanted, tqdm_class=_Progress))
    except (DryRunError, LocalEntryNotFoundError) as error:
        folder, num_bytes = _find_offline(wanted | {"local_files_only": True}, error.__cause__), 0
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(_refusal(name, revision, error)) from None
    return ModelDownload(folder, folder.name, license_of_model(folder), num_bytes)


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


# Adapters.


def find_adapter(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of an adapter that `lookonce adapter push` uploaded; downloaded unless `is_local` or here already.

    Its last part is the commit.

    Raises:
        ModelError: it is not available.
    """
    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": ADAPTER_FILES, "tqdm_class": _Progress}
    at = f"adapter {name}" + (f" at revision {revision}" if revision else "")
    try:
        return Path(snapshot_download(name, local_files_only=is_local, **wanted))
    except LocalEntryNotFoundError as error:
        why = f", and the Hub cannot be asked for it ({first_line(error.__cause__)})" if error.__cause__ else ""
        raise ModelError(f"{at} is not on this machine{why}; where there is internet run: {FETCH_COMMAND}") from None
    except GatedRepoError:
        raise ModelError(
            f"{at} requires accepting its licence: do so at https://huggingface.co/{name}, then: hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{at} does not exist; name a commit, a branch or a tag of it") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{at} is not on the Hub, or you may not access it; check the name, or if it is private: hf auth login"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"{at} is not available from the Hub ({first_line(error)})") from None


# Datasets.


def download_dataset(name: str, revision: str | None, files: Sequence[str]) -> Download:
    """Download the files of a dataset that match some patterns.

    Raises:
        SourceError: it is not available.
    """
    try:
        commit, license = _resolve(name, revision)
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=commit,
            allow_patterns=[*files, *DATASET_INFO],
            tqdm_class=_Progress,  # type: ignore[arg-type]  # any kind of tqdm will do
        )
    except Exception as error:  # from httpx, from huggingface_hub, from the disk
        at = f" at revision {revision}" if revision else ""
        raise SourceError(
            f"cannot download {name}{at} from the Hub: {first_line(error)}\n"
            "Check the network and the name; for a dataset that requires consent, log in with `hf auth login`. Read a "
            "local copy with --source DIR"
        ) from None
    return Download(Path(folder), commit, license)


def _resolve(name: str, revision: str | None) -> tuple[str, str | None]:
    """The commit that a revision is, and the licence that the dataset's card names."""
    try:
        info = HfApi().dataset_info(name, revision=revision)
    except Exception:
        if revision and is_commit(revision):  # maybe downloaded before
            return revision, None
        raise
    if not info.sha:
        raise ValueError("the Hub names no commit")
    return info.sha, _license_of_dataset(info)


def _license_of_dataset(info: Any) -> str | None:
    card = info.card_data.to_dict() if info.card_data else {}
    license = card.get("license") or next(
        (tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")), None
    )
    return ", ".join(license) if isinstance(license, list) else license


class _Progress(tqdm):  # type: ignore[type-arg]
    """A bar on a terminal, also where the libraries' own bars are switched off; shown after a moment."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"delay": PROGRESS_DELAY_S, **options, "disable": options.get("disable") or None})
