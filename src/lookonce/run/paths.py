"""Types of the paths in a run file: `~` and environment variables are expanded, and a variable must be set.

A variable that is not set is an error, because a folder named `$SCRATCH` would be made otherwise. Two kinds of paths
may keep one: `cache.stage`, whose variable is often set within jobs only, and paths recorded by earlier versions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

RECORDED = {"is_recorded": True}
"""The validation context of values that were recorded with a run, in which variables need not be set."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]+)\})", re.ASCII)


def expand(path: str) -> str:
    """Expand `~` and environment variables; a variable that is not set stays as written.

    Raises:
        ValueError: there is no such user.
    """
    expanded = os.path.expanduser(os.path.expandvars(path))
    if expanded.startswith("~"):
        raise ValueError(f"there is no home folder of {expanded.partition('/')[0]}; write the path in full")
    return expanded


def _expand_all(path: str, info: ValidationInfo) -> str:
    unset = [name for found in VARIABLE.findall(path) for name in found if name and name not in os.environ]
    if unset and info.context != RECORDED:
        raise ValueError(f"the environment variable {unset[0]} is not set; set it, or write the path without it")
    return expand(path)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | Path) else value


UserPath = Annotated[Path, AfterValidator(lambda path, info: Path(_expand_all(str(path), info)))]
"""A path whose variables must be set."""
StagePath = Annotated[Path, AfterValidator(lambda path: Path(expand(str(path))))]
"""A path that may not exist; a variable that is not set stays as written."""
ModelName = Annotated[str, Field(min_length=1), AfterValidator(_expand_all)]
"""A path, or the name of a model on the Hub."""
Paths = Annotated[list[UserPath], BeforeValidator(_as_list)]
"""One path or a list of them."""
OptionalPaths = Annotated[Paths, BeforeValidator(lambda value: [] if value is None else value)]
"""One path, a list of them, or none: a key without a value."""
