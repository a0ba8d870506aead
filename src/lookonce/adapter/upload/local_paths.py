"""What is uploaded names no folder of this machine, since folders have names of people, projects and hosts in them.

Design: the paths of a run file are known by their types, so each becomes its last part, relative ones too. In files of
other programs a text is a path if it begins like one. `check_files` then looks for what must not be there at all, in
case a file has a path in another form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lookonce.adapter.upload.base_model import BaseModel
from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.run.sections.model import ModelSection
from lookonce.settings import Section

ABSOLUTE = re.compile(r"(~|/|[A-Za-z]:[\\/])[^\s{}<>|]*[\\/][^\n]*|/[\w.-]+")
"""A text that is an absolute path."""
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")
"""An access token of the Hub."""


def reduced_run(run: RunFile, base: BaseModel) -> RunFile:
    """The run with the name of its base model on the Hub, and each path as its last part."""
    return _reduced(run, base)  # type: ignore[no-any-return]


def _reduced(value: Any, base: BaseModel) -> Any:
    if isinstance(value, ModelSection):
        return value.model_copy(update={"path": base.name, "revision": base.commit})
    if isinstance(value, Section):
        return value.model_copy(update={name: _reduced(inner, base) for name, inner in value})
    if isinstance(value, list):
        return [_reduced(inner, base) for inner in value]
    return Path(value.name) if isinstance(value, Path) else value


def without_folders(value: Any) -> Any:
    """JSON in which each text that is an absolute path has become its last part."""
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and ABSOLUTE.fullmatch(value) else value


def check_files(texts: Mapping[str, str], folders: Iterable[Path]) -> None:
    """Check that texts name neither some folders nor the home folder, and have no access token.

    Raises:
        UsageError: one does; names the file.
    """
    private = [str(path) for path in folders if len(path.parts) > 2] + [str(Path.home())]
    patterns = {one: re.compile(rf"(?<![\w.-]){re.escape(one)}(?![\w.-])") for one in private if one != os.sep}
    for name, text in texts.items():
        if found := next((one for one, pattern in patterns.items() if pattern.search(text)), ""):
            raise UsageError(f"{name} names a folder of this machine, {found}; remove it there, then push again")
        if TOKEN.search(text):
            raise UsageError(f"{name} has an access token of the Hub; remove it there, then push again")
