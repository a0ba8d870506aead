"""A run with absolute paths: how a run is recorded, so that it is found again from every working directory.

Design: the paths that a user writes are relative to the working directory, as in a shell, and stay as written in
messages. Only the record in the run folder is absolute. Paths are not compared when a run is resumed (folder.py), so
data that was moved makes no other run. A Hub name, and a variable that is not set (`cache.stage`), stay as written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lookonce.run.config import RunFile
from lookonce.run.sections.model import ModelSection
from lookonce.run.sections.paths import VARIABLE
from lookonce.settings import Section


def with_absolute_paths(run: RunFile) -> RunFile:
    """The same run, with paths that do not depend on the working directory."""
    return _absolute(run)  # type: ignore[no-any-return]


def _absolute(value: Any) -> Any:
    if isinstance(value, ModelSection):
        is_folder = Path(value.path).is_dir()
        return value.model_copy(update={"path": str(Path(value.path).absolute())}) if is_folder else value
    if isinstance(value, Section):
        return value.model_copy(update={name: _absolute(inner) for name, inner in value})
    if isinstance(value, list):
        return [_absolute(inner) for inner in value]
    return value.absolute() if isinstance(value, Path) and not VARIABLE.search(str(value)) else value
