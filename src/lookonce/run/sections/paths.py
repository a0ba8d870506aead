"""Types of the paths in a run file: `~` and environment variables are expanded, and a variable must be set.

A variable that is not set is an error, because a folder named `$SCRATCH` would be made otherwise; so is an empty one,
with which `$SCRATCH/caches` would be a folder at the root of the disk. Two kinds of paths may keep a variable:
`cache.stage`, whose variable is often set within jobs only, and paths recorded by earlier versions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from lookonce.settings import as_list

RECORDED = {"is_recorded": True}
"""The validation context of values that were recorded with a run, in which variables need not be set."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]+)\})", re.ASCII)

SECRET = re.compile("(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)(_|$)", re.IGNORECASE)
"""What the names of variables with secrets have."""


def expand(path: str) -> str:
    """Expand `~` and environment variables; a variable that is not set, or is empty, stays as written.

    Raises:
        ValueError: there is no such user, or a variable is a secret.
    """
    if secret := next((name for name in map(_name, VARIABLE.finditer(path)) if SECRET.search(name)), None):
        raise ValueError(f"the environment variable {secret} is a secret, which messages about the path would show")
    expanded = os.path.expanduser(VARIABLE.sub(lambda found: os.environ.get(_name(found)) or found[0], path))
    if expanded.startswith("~"):
        raise ValueError(f"there is no home folder of {expanded.partition('/')[0]}; write the path in full")
    return expanded


def _expand_all(path: str, info: ValidationInfo) -> str:
    unset = [name for name in map(_name, VARIABLE.finditer(path)) if not os.environ.get(name)]
    if unset and info.context != RECORDED:
        if unset[0] in os.environ:
            raise ValueError(f"the environment variable {unset[0]} is empty; set it, or write the path without it")
        raise ValueError(f"the environment variable {unset[0]} is not set; set it, or write the path without it")
    return expand(path)


def _name(found: re.Match[str]) -> str:
    """The name of a variable that was found in a path."""
    return found[1] or found[2]


UserPath = Annotated[Path, AfterValidator(lambda path, info: Path(_expand_all(str(path), info)))]
"""A path whose variables must be set."""
StagePath = Annotated[Path, AfterValidator(lambda path: Path(expand(str(path))))]
"""A path that may not exist; a variable that is not set stays as written."""
ModelName = Annotated[str, Field(min_length=1), AfterValidator(_expand_all)]
"""A path, or the name of a model on the Hub."""
Paths = Annotated[list[UserPath], BeforeValidator(as_list)]
"""One path or a list of them."""
