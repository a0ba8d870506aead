"""Whether downloaded files have the content that the Hub states; a download by huggingface_hub compares their sizes.

Design: the Hub states a hash of each file of a commit: the sha256 of a large file (LFS, Xet), and of others git's blob
id, the sha1 over their size and bytes. Both are computed here from the bytes on the disk, so a file that was changed on
the way or on the disk is found. That takes two requests, and reads each file once: 2 GB in 1.4 s on two cores. Files
that were right are noted with their sizes and times, in the folder in HF_HOME that is meant for other libraries, and
not read again until these change. Without the Hub nothing can be verified: files that are not noted are used, and
`verify` returns False. Files that the Hub does not list have no hash; `unlisted.py` says which of them are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.hf_api import RepoFile

from lookonce.errors import LookonceError, ModelError, SourceError
from lookonce.files import open_regular, read_object, write_json
from lookonce.hub.names import FETCH_COMMAND
from lookonce.hub.progress import Progress
from lookonce.hub.unlisted import unlisted
from lookonce.text import Notify, first_line, listed, one_line, quiet, shell
from lookonce.threads import threaded_map

BLOCK_BYTES = 1 << 22
TIMEOUT_S = 10
NOTES = ("lookonce", "verified")
"""The folder of notes in huggingface_hub's folder for what other libraries keep."""
REPOSITORY_TYPES = {"model": "model", "adapter": "model", "dataset": "dataset"}
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
        raise _error(kind, name, wrong)
    with contextlib.suppress(OSError):  # a read-only folder
        write_json(_note(folder), {"folder": str(folder.resolve()), "files": stamps})
    return True


def _stated(kind: str, name: str, folder: Path) -> list[Stated]:
    """The files of a commit as the Hub states them."""
    api, type_ = HfApi(), REPOSITORY_TYPES[kind]
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


def _error(kind: str, name: str, wrong: list[tuple[Stated, str]]) -> LookonceError:
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
