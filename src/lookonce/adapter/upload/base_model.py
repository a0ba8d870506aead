"""The base model of a run by its name on the Hub, which is all that other people can use.

Design: the name is never guessed from a folder's name. It is the run file's, or that of huggingface_hub's own folder
(`models--OWNER--NAME/snapshots/COMMIT`), or the user gives it. The commit is known only of what was downloaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lookonce.errors import ModelError, UsageError
from lookonce.hub import find_model, is_commit, is_hub_name, license_of_model
from lookonce.run.sections.model import ModelSection

DOWNLOADED = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")
"""The end of the path of a model that huggingface_hub has downloaded."""


@dataclass(frozen=True)
class BaseModel:
    """A model on the Hub."""

    name: str
    """Owner and name."""
    commit: str | None
    """None if it is not known."""
    licence: str | None
    """The licence that its card on this machine names; None if there is none."""


def find_base_model(model: ModelSection, given: str | None = None) -> BaseModel:
    """The base model of a run; `given` is its name on the Hub, which may have a commit: owner/name@COMMIT.

    Raises:
        UsageError: the run names a folder and the name is not given, or it is malformed.
    """
    folder = Path(model.path).expanduser()
    if given is not None:
        name, _, revision = given.partition("@")
        if not is_hub_name(name) or (revision and not is_commit(revision)):
            raise UsageError(f"--base-model {given!r} is not a model on the Hub; write OWNER/NAME or OWNER/NAME@COMMIT")
        return BaseModel(name, revision or None, license_of_model(folder) if folder.is_dir() else None)
    if folder.is_dir():
        return _downloaded(folder)
    local = _on_this_machine(model)
    commit = model.revision if is_commit(model.revision) else (local.name if local else None)
    return BaseModel(model.path, commit, license_of_model(local) if local else None)


def _downloaded(folder: Path) -> BaseModel:
    found = DOWNLOADED.search(folder.resolve().as_posix())
    if found is None:
        raise UsageError(
            f"the base model of the run is a folder, {folder}, and its name on the Hub is not known; "
            "name it: --base-model OWNER/NAME"
        )
    return BaseModel(f"{found['owner']}/{found['name']}", found["commit"], license_of_model(folder))


def _on_this_machine(model: ModelSection) -> Path | None:
    if not is_hub_name(model.path):
        raise UsageError(
            f"the base model of the run, {model.path}, is neither a folder any more nor a name on the Hub; "
            "name it: --base-model OWNER/NAME"
        )
    try:
        return find_model(model.path, model.revision, is_local=True)
    except ModelError:
        return None
