"""Models, adapters and datasets on the Hugging Face Hub: downloaded, verified, and found where there is no internet.

Design: huggingface_hub keeps the files in the folder that HF_HOME names. Offline it finds what was downloaded online.
Finding a model asks for the same files as downloading it, so an incomplete download is recognised. A dataset is always
downloaded at a commit: without a revision, at the commit that `main` is now.

A download compares the sizes of files and no more. huggingface_hub's `verify_repo_checksums` compares the bytes on the
disk with the hashes that the Hub states. That takes two requests, and reads each file once, at about 1 GB/s. What was
verified is noted with sizes and times, in the folder in HF_HOME that is meant for other libraries, and not read again
until these change. Without the Hub, files that are not noted are used, and `verify` returns False.

A loader reads what it finds in a folder: an index that the Hub does not have replaces the weights, a chat template the
prompts, a table is read as more rows. So any file that the Hub does not list is refused, unless its name begins with a
dot, and so is a link to a folder, because what lies behind it would not be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, constants, metadata_load, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from lookonce.disk_space import check_room
from lookonce.errors import LookonceError, ModelError, NoRoom, SourceError, full_disk_code
from lookonce.files import read_object, write_json
from lookonce.text import Notify, first_line, listed, located, one_line, quiet, shell

CARD = "README.md"
FETCH_COMMAND = "lookonce fetch RUN.yaml"
TIMEOUT_S = 10
NOTES = ("lookonce", "verified")
"""The folder of notes in huggingface_hub's folder for what other libraries keep."""
AGAIN = {"model": FETCH_COMMAND, "adapter": FETCH_COMMAND, "dataset": "lookonce data prepare DATASET DIR"}
"""The command that downloads what is missing."""
KEYS = {"model": "`model.path` and `model.revision`", "adapter": "`train.start_from`"}
"""What of a run file names it."""
ERRORS: dict[str, type[LookonceError]] = {"model": ModelError, "adapter": ModelError, "dataset": SourceError}
FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt")
"""The files of a model: weights, configurations, tokenizer, chat template."""
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json", "run.json", "trained.json")
"""The files of an uploaded adapter that a training starts from: weights, shape, and the record of the run."""
DATASET_INFO = (CARD, "LICENSE*")
"""Files of a dataset that are always downloaded with it."""


@dataclass(frozen=True)
class Download:
    """Files of a repository on the Hub that are on this machine."""

    folder: Path
    downloaded_bytes: int = 0
    """Bytes of a model that were not here before; 0 if the Hub could not be reached."""
    is_verified: bool = True
    """Whether all files of a model have the content that the Hub states; False if the Hub could not be asked."""
    refusal: str = ""

    @property
    def commit(self) -> str:
        return self.folder.name

    @property
    def license(self) -> str | None:
        """The licence that the card names; None if it names none."""
        return license_in(self.folder)


class Progress(tqdm):  # type: ignore[type-arg]
    """A bar on a terminal, also where the libraries' own bars are switched off; shown after a moment."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"delay": 1.0, **options, "disable": options.get("disable") or None})


def is_hub_name(name: str) -> bool:
    """Whether it has the form of a repository's name on the Hub, owner/name."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))


def is_commit(revision: str | None) -> bool:
    """Whether a revision always means the same files; branches and tags may be moved."""
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision or ""))


def check_disk(error: BaseException) -> None:
    """Raise NoRoom if a download failed because the disk of the folder of all downloads is full."""
    if (code := full_disk_code(error)) is not None:
        raise NoRoom(code, Path(constants.HF_HUB_CACHE)) from error


def verify(kind: str, name: str, folder: Path, notify: Notify = quiet) -> bool:
    """Compare the files of a downloaded commit with the hashes that the Hub states; False if it cannot be reached.

    `kind` is `model`, `adapter` or `dataset`; the last part of `folder` is the commit. `notify` gets why the Hub is
    unreachable.

    Raises:
        ModelError: a file of a model or an adapter differs, or is not listed; names it and the command.
        SourceError: the same of a dataset.
    """
    links = [path for path in folder.rglob("*") if path.is_symlink() and path.is_dir()]
    paths = [*links, *(path for path in folder.rglob("*") if path.is_file())]
    stats = {path.relative_to(folder).as_posix(): path.stat() for path in paths}
    stamps = {name: [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()}
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    note = Path(constants.HF_ASSETS_CACHE, *NOTES, f"{digest}.json")
    verified = {"folder": str(folder.resolve()), "files": stamps}
    if read_object(note) == verified:
        return True
    where: dict[str, Any] = {"repo_type": "dataset" if kind == "dataset" else "model", "revision": folder.name}
    try:
        # First a request that is made once: without the Hub, a listing would be asked for again for half a minute.
        HfApi().repo_info(name, timeout=TIMEOUT_S, **where)
        comparison = HfApi().verify_repo_checksums(name, local_dir=folder, **where)
    except Exception as error:  # from httpx, from huggingface_hub
        notify(first_line(error))
        return False
    changed = {
        file["path"]: f"{file['path']} ({file['algorithm']} {file['actual']}, the Hub states {file['expected']})"
        for file in comparison.mismatches
    }
    names = {*comparison.extra_paths, *(path.relative_to(folder).as_posix() for path in links)}
    added = sorted(one_line(name) for name in names if not re.search(r"(^|/)\.", name))
    if changed or added:
        wrong = [*changed.values(), *(f"{path} (which the Hub does not list)" for path in added)]
        paths = [*((folder / path).resolve() for path in changed), *(folder.absolute() / path for path in added)]
        raise ERRORS[kind](
            f"{kind} {name!r} differs from what the Hub states at commit {folder.name}: {listed(wrong)}\n"
            f"Remove these files, or move them away, and download again: {shell('rm', *paths)} && {AGAIN[kind]}"
        )
    with contextlib.suppress(OSError):  # a read-only folder
        write_json(note, verified)
    return True


def locate(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of a model: `name` itself, or the Hub's model on this machine; raises ModelError without one."""
    check_name(name)
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else find_model(name, revision, is_local=is_local)


def check_name(name: str) -> None:
    """Raise ModelError for what is neither a folder nor a repository's name; asks no other machine."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and not is_hub_name(name):
        raise ModelError(
            f"no model folder at {located(folder)}; set `model.path` to a folder or to a Hub id (owner/name)"
        )


def find_model(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of a model of the Hub, downloaded unless `is_local`; raises ModelError if it is not available."""
    return _find("model", name, revision, FILES, is_local)


def find_adapter(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of an adapter that `lookonce adapter push` uploaded; downloaded unless `is_local` or here already.

    Its last part is the commit.

    Raises:
        ModelError: it is not available, or is not what the Hub states.
    """
    return _find("adapter", name, revision, ADAPTER_FILES, is_local)


def _find(kind: str, name: str, revision: str | None, patterns: Sequence[str], is_local: bool) -> Path:
    arguments: dict[str, Any] = {"revision": revision, "allow_patterns": list(patterns), "tqdm_class": Progress}
    try:
        folder = Path(snapshot_download(name, local_files_only=is_local, **arguments))
    except (OSError, ValueError) as error:  # those of huggingface_hub and httpx among them
        raise _refusal(kind, name, revision, error) from None
    if not is_local:
        verify(kind, name, folder)
    return folder


def download_model(name: str, revision: str | None) -> Download:
    """Download the missing files of a model; if the Hub cannot be reached, all must be here.

    Raises:
        ModelError: it is not available, is not what the Hub states, or the disk is too full.
    """
    arguments: Any = {"repo_id": name, "revision": revision, "allow_patterns": [*FILES, CARD], "tqdm_class": Progress}
    num_bytes = 0
    try:
        files: Any = snapshot_download(**arguments, dry_run=True)
        num_bytes = sum(file.file_size for file in files if file.will_download)
        hub_cache = Path(constants.HF_HUB_CACHE)
        advice = "Make room, or set HF_HOME to a folder on another disk"
        check_room(hub_cache, num_bytes, f"model {name!r} in {hub_cache}", advice)
        folder = Path(snapshot_download(**arguments))
    except (DryRunError, LocalEntryNotFoundError) as error:  # the Hub cannot be reached
        try:
            folder = Path(snapshot_download(**arguments, local_files_only=True))
        except LocalEntryNotFoundError:
            raise _refusal("model", name, revision, error) from None
    except (OSError, ValueError) as error:
        raise _refusal("model", name, revision, error) from None
    reasons: list[str] = []
    is_verified = verify("model", name, folder, notify=reasons.append)
    return Download(folder, num_bytes, is_verified, *reasons)


def _refusal(kind: str, name: str, revision: str | None, error: BaseException) -> ModelError:
    """What is wrong with a model or an adapter, and what to do about it; raises NoRoom if the disk is full."""
    check_disk(error)
    subject, reason, log_in = f"{kind} {name!r}", error.__cause__, "hf auth login"
    here = f" (and no folder {Path(name).absolute()})" if kind == "model" else ""
    if isinstance(reason, RepositoryNotFoundError):
        error = reason
    elif isinstance(error, DryRunError | LocalEntryNotFoundError):
        at = f"revision {revision}" if revision else "its newest revision"
        why = f", and the Hub cannot be reached ({first_line(reason)})" if reason else ""
        return ModelError(
            f"there is no complete download of {subject} at {at} on this machine{here}{why}; with internet access "
            f"run: {FETCH_COMMAND}"
        )
    if isinstance(error, GatedRepoError):
        wrong = f"{subject} requires accepting its licence: do so at https://huggingface.co/{name}, then: {log_in}"
    elif isinstance(error, RevisionNotFoundError):
        wrong = f"{subject} has no revision {revision!r}; name a branch, a tag or a commit of it in {KEYS[kind]}"
    elif isinstance(error, RepositoryNotFoundError):
        wrong = f"the Hub has no {subject} that you may access{here}; check {KEYS[kind]}, or if it is private: {log_in}"
    else:
        wrong = (
            f"{subject} is not available from the Hub ({first_line(error)}); check {KEYS[kind]}, or where there is "
            f"internet run: {FETCH_COMMAND}"
        )
    return ModelError(wrong)


def license_in(folder: Path) -> str | None:
    """The licence that the card in a folder names; None if it names none, or there is no card."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        card = metadata_load(folder / CARD) or {}
        names = [card.get("license"), card.get("license_name"), card.get("license_link")]
        names = [*names[0], *names[1:]] if isinstance(names[0], list) else names
        return ", ".join(str(name) for name in names if name) or None
    return None


def download_dataset(name: str, revision: str | None, files: Sequence[str]) -> Download:
    """Download the files of a dataset that match some patterns; raises SourceError if they are not available."""
    try:
        commit = revision if is_commit(revision) else HfApi().dataset_info(name, revision=revision).sha
        folder = snapshot_download(
            name,
            repo_type="dataset",
            revision=commit,
            allow_patterns=[*files, *DATASET_INFO],
            tqdm_class=Progress,  # type: ignore[arg-type]  # any kind of tqdm will do
        )
    except Exception as error:  # from httpx, from huggingface_hub, from the disk
        check_disk(error)
        at = f" at revision {revision}" if revision else ""
        raise SourceError(
            f"cannot download {name}{at} from the Hub: {first_line(error)}\n"
            "Check the network and the name; for a dataset that requires consent, log in with `hf auth login`. Read a "
            "local copy with --source DIR"
        ) from None
    verify("dataset", name, Path(folder))
    return Download(Path(folder))
