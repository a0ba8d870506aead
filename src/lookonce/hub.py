"""Models, adapters and datasets on the Hugging Face Hub: downloaded, verified, and found where there is no internet.

Design: huggingface_hub keeps the files in the folder that HF_HOME names, where other tools find them, and resumes
interrupted downloads. Offline it finds what was downloaded online: a commit by its hash, a branch or tag as it was
then. Finding a model asks for the same files as downloading it, so an incomplete download is recognised. Weights in
other formats than safetensors are not downloaded. A dataset is always downloaded at a commit: without a revision, at
the commit that `main` is now.

huggingface_hub compares the sizes of what it downloads and no more. The Hub states a hash of each file of a commit: the
sha256 of a large file (LFS, Xet), and of others git's blob id, the sha1 over their size and bytes. Both are computed
here from the bytes on the disk, so a file that was changed on the way or on the disk is found. That takes two requests,
and reads each file once: 2 GB in 1.4 s on two cores. Files that were right are noted with their sizes and times, in the
folder in HF_HOME that is meant for other libraries, and not read again until these change. Without the Hub nothing can
be verified: files that are not noted are used, and `verify` returns False.

A loader reads what it finds in a folder: an index that the Hub does not have replaces the weights, a chat template the
prompts, an `adapter_config.json` the model, a table is read as more rows. So files that the Hub does not list are
refused by their names if a program would read them. Others, such as notes, are left alone, and so is what begins with a
dot. A link to a folder is refused: the Hub has none, and what lies behind it would not be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
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
from huggingface_hub.hf_api import RepoFile
from tqdm import tqdm

from lookonce.disk_space import check_room
from lookonce.errors import DiskFull, LookonceError, ModelError, NoRoom, SourceError, full_disk_code
from lookonce.files import open_regular, read_object, write_json
from lookonce.text import Notify, first_line, listed, located, one_line, quiet, shell
from lookonce.threads import threaded_map

CARD = "README.md"
FETCH_COMMAND = "lookonce fetch RUN.yaml"


@dataclass(frozen=True)
class Download:
    """Files of a repository on the Hub that are on this machine."""

    folder: Path
    commit: str
    license: str | None
    """The licence that the card names; None if it names none."""


def check_disk(error: Exception) -> None:
    """Raise NoRoom if a download failed because the disk of the folder of all downloads is full."""
    if (code := full_disk_code(error)) is not None:
        raise NoRoom(code, Path(constants.HF_HUB_CACHE)) from error


def is_hub_name(name: str) -> bool:
    """Whether it has the form of a repository's name on the Hub, owner/name."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name))


def is_commit(revision: str | None) -> bool:
    """Whether a revision always means the same files; branches and tags may be moved."""
    return bool(re.fullmatch(r"[0-9a-f]{40}", revision or ""))


class Progress(tqdm):  # type: ignore[type-arg]
    """A bar on a terminal, also where the libraries' own bars are switched off; shown after a moment."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"delay": 1.0, **options, "disable": options.get("disable") or None})


WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
SETTINGS = ("*.json", "*.jinja", "*.py", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
"""Index, configurations, tokenizer, processor, chat templates and code."""
ROWS = ("*.parquet", "*.tar", "*.csv", "*.json", "*.jsonl", "*.zip", "*.py")
READ = {"model": WEIGHTS + SETTINGS, "adapter": WEIGHTS + SETTINGS, "dataset": ROWS}
"""The files that programs read in a folder, by what it holds."""


def unlisted(
    folder: Path, names: Iterable[str], stated: Collection[str], kind: str, patterns: Sequence[str] = ()
) -> list[str]:
    """Those of some names in a folder that the Hub has not `stated` as files, and that would be read, sorted.

    `kind` is `model`, `adapter` or `dataset`; `patterns` are those of more files that will be read.
    """
    wanted = (*READ[kind], *patterns)
    seen = (name for name in names if not any(part.startswith(".") for part in PurePosixPath(name).parts))
    return sorted(name for name in seen if (folder / name).is_dir() or (name not in stated and _matches(name, wanted)))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path or its last part matches a pattern; readers do not tell A from a."""
    name = name.lower()
    candidates = name, PurePosixPath(name).name
    return any(fnmatchcase(one, pattern.lower()) for one in candidates for pattern in patterns)


BLOCK_BYTES = 1 << 22
TIMEOUT_S = 10
NOTES = ("lookonce", "verified")
"""The folder of notes in huggingface_hub's folder for what other libraries keep."""
AGAIN = {"model": FETCH_COMMAND, "adapter": FETCH_COMMAND, "dataset": "lookonce data prepare DATASET DIR"}
"""The command that downloads what is missing."""
ERRORS: dict[str, type[LookonceError]] = {"model": ModelError, "adapter": ModelError, "dataset": SourceError}


@dataclass(frozen=True)
class Stated:
    """A file of a repository on this machine, and its hash as the Hub states it."""

    name: str
    path: Path
    kind: str
    """`sha256` or `git blob id`."""
    hash: str

    @classmethod
    def of(cls, file: RepoFile, folder: Path) -> Stated:
        path = folder / file.path
        return cls(file.path, path, *(("sha256", file.lfs.sha256) if file.lfs else ("git blob id", file.blob_id)))

    def computed(self, progress: Progress) -> str:
        """The hash of the bytes that are on the disk."""
        digest = hashlib.sha256() if self.kind == "sha256" else hashlib.sha1(usedforsecurity=False)
        with open_regular(self.path) as file:
            if self.kind != "sha256":
                digest.update(b"blob %d\0" % self.path.stat().st_size)
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                progress.update(len(block))
        return digest.hexdigest()


def verify(kind: str, name: str, folder: Path, patterns: Sequence[str] = (), notify: Notify = quiet) -> bool:
    """Compare the files of a downloaded commit with the hashes that the Hub states; False if it cannot be asked.

    `kind` is `model`, `adapter` or `dataset`; the last part of `folder` is the commit. `patterns` are those of files
    that will be read beside the usual ones. `notify` gets why the Hub cannot be asked.

    Raises:
        ModelError: a file of a model or an adapter differs, or is not listed and would be read; names it and the
            command.
        SourceError: the same of a dataset.
    """
    noted = _read_note(folder)
    stamps = {path.relative_to(folder).as_posix(): _stamp(path) for path in folder.rglob("*") if _is_content(path)}
    if not (unknown := {file for file, stamp in stamps.items() if noted.get(file) != stamp}):
        return True
    try:
        stated = _stated(kind, name, folder)
    except Exception as error:  # from httpx, from huggingface_hub
        notify(first_line(error))
        return False
    if extra := unlisted(folder, unknown, {one.name for one in stated}, kind, patterns):
        raise _unlisted_error(kind, name, folder, extra)
    if wrong := _differences([one for one in stated if one.name in unknown]):
        raise _difference_error(kind, name, wrong)
    with contextlib.suppress(OSError):  # a read-only folder
        write_json(_note(folder), {"folder": str(folder.resolve()), "files": stamps})
    return True


def _stated(kind: str, name: str, folder: Path) -> list[Stated]:
    """The files of a commit as the Hub states them."""
    api, type_ = HfApi(), "dataset" if kind == "dataset" else "model"
    # First a request that is made once: without the Hub, a listing would be asked for again for half a minute.
    api.repo_info(name, repo_type=type_, revision=folder.name, timeout=TIMEOUT_S)
    tree = list(api.list_repo_tree(name, repo_type=type_, revision=folder.name, recursive=True))
    return [Stated.of(file, folder) for file in tree if isinstance(file, RepoFile)]


def _differences(stated: list[Stated]) -> list[tuple[Stated, str]]:
    """The files with another content than stated, each with the hash that it has."""
    total = sum(one.path.stat().st_size for one in stated)
    with Progress(total=total, desc="verifying", unit="B", unit_scale=True, leave=False) as progress:
        computed = threaded_map(lambda one: one.computed(progress), stated)
        return [(one, found) for one, found in zip(stated, computed, strict=True) if found != one.hash]


def _difference_error(kind: str, name: str, wrong: list[tuple[Stated, str]]) -> LookonceError:
    lines = [f"{one.name} has the {one.kind} {found}, and the Hub states {one.hash}" for one, found in wrong]
    paths = shell(*(one.path.resolve() for one, _ in wrong))
    return ERRORS[kind](
        f"{kind} {name!r} was changed on its way or on the disk: {listed(lines)}\n"
        f"Remove what was changed, and download it again: rm {paths} && {AGAIN[kind]}"
    )


def _unlisted_error(kind: str, name: str, folder: Path, extra: list[str]) -> LookonceError:
    names = [one_line(one) for one in extra]
    paths = shell(*(folder.absolute() / one for one in names))
    return ERRORS[kind](
        f"the folder of {kind} {name!r} has files that the Hub does not list at commit {folder.name}, and that would "
        f"be read: {listed(names)}\nMove them to another folder, or remove them: rm {paths} && {AGAIN[kind]}"
    )


def _note(folder: Path) -> Path:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return Path(constants.HF_ASSETS_CACHE, *NOTES, f"{digest}.json")


def _read_note(folder: Path) -> dict[str, Any]:
    """The sizes and times of verified files; empty if none was."""
    note = read_object(_note(folder))
    files = note.get("files")
    return files if note.get("folder") == str(folder.resolve()) and isinstance(files, dict) else {}


def _is_content(path: Path) -> bool:
    """Whether it is a file, or a link to a folder, which `rglob` does not enter."""
    return path.is_file() or (path.is_symlink() and path.is_dir())


def _stamp(path: Path) -> list[int]:
    """The size and the times of a file. No program can set the second one."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


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


ADAPTER_FILES = ["adapter_model.safetensors", "adapter_config.json", "run.json", "trained.json"]
"""The files of an uploaded adapter that a training starts from: weights, shape, and the record of the run."""


def find_adapter(name: str, revision: str | None, *, is_local: bool = False) -> Path:
    """The folder of an adapter that `lookonce adapter push` uploaded; downloaded unless `is_local` or here already.

    Its last part is the commit.

    Raises:
        ModelError: it is not available, or is not what the Hub states.
    """
    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": ADAPTER_FILES, "tqdm_class": Progress}
    at = f"adapter {name}" + (f" at revision {revision}" if revision else "")
    try:
        folder = Path(snapshot_download(name, local_files_only=is_local, **wanted))
        if not is_local:
            verify("adapter", name, folder)
        return folder
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
        check_disk(error)
        raise ModelError(f"{at} is not available from the Hub ({first_line(error)})") from None


DATASET_INFO = (CARD, "LICENSE*")
"""Files of a dataset that are always downloaded with it."""


def download_dataset(name: str, revision: str | None, files: Sequence[str]) -> Download:
    """Download the files of a dataset that match some patterns.

    Raises:
        SourceError: it is not available, or is not what the Hub states.
    """
    try:
        commit, license = _resolve(name, revision)
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
    verify("dataset", name, Path(folder), files)
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
