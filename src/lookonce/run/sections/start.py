"""The type of `train.start_from`: the path of another run, or an adapter on the Hub.

Design: `runs/first` could be a folder or a repository's name, so an adapter on the Hub has the scheme of
huggingface_hub's file system, `hf://owner/name@revision`
(https://huggingface.co/docs/huggingface_hub/guides/hf_file_system). It stays text, because a path would lose a slash.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from lookonce.run.sections.paths import UserPath

SCHEME = "hf://"
FORM = re.compile(r"hf://(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^@\s]+))?")


class HubAdapter(NamedTuple):
    """An adapter on the Hub."""

    name: str
    """Owner and name of the repository."""
    revision: str | None
    """A branch, a tag or a commit; None for the newest."""

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + (f"@{self.revision}" if self.revision else "")


def hub_adapter(start: Path | str | None) -> HubAdapter | None:
    """The adapter on the Hub that a value of `train.start_from` names; None for a path."""
    found = FORM.fullmatch(start) if isinstance(start, str) else None
    return HubAdapter(found["name"], found["revision"]) if found else None


def _either(value: Any, as_path: ValidatorFunctionWrapHandler) -> Any:
    if not (isinstance(value, str) and value.startswith(SCHEME)):
        return as_path(value)
    if hub_adapter(value) is None:
        raise ValueError(f"an adapter on the Hub is {SCHEME}OWNER/NAME@COMMIT (got {value})")
    return value


if TYPE_CHECKING:
    StartFrom = Path | str
else:
    StartFrom = Annotated[UserPath, WrapValidator(_either), PlainSerializer(str, when_used="json")]
