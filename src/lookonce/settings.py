"""Files of settings that people write: YAML, checked by pydantic, with all that is wrong told at once in our words."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from lookonce.errors import UsageError

Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(
    path: Path,
    kind: type[Settings],
    called: str,
    hint: str,
    expected: str,
    change: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Settings:
    """Read a YAML file; `change` may alter what it says before it is checked.

    In messages the file is `called` so; `hint` follows where it can not be read, `expected` says what it must hold.

    Raises:
        UsageError: it is missing, no YAML, or a key or value is wrong.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can not read {called}: {error}; {hint}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{called} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{called} must be {expected}")
    change(values)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "\n".join(f"  {_explain(problem, kind)}" for problem in error.errors())
        raise UsageError(f"{called} is wrong:\n{problems}") from None


def _explain(problem: Any, kind: type[BaseModel]) -> str:
    """One of pydantic's errors in our words."""
    location = [str(part) for part in problem["loc"]]
    name = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(location))
    if problem["type"] == "extra_forbidden":
        keys = _keys(kind, location[:-1])
        near = difflib.get_close_matches(location[-1], keys, n=1, cutoff=0.5)
        hint = f"; did you mean `{near[0]}`?" if near else f"; known keys: {', '.join(keys)}" if keys else ""
        return f"{name}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{name}: is missing"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    return f"{name}: {message}" + ("" if isinstance(given, dict) and given else f" (got {given!r})")


def _keys(kind: Any, location: Sequence[str]) -> list[str]:
    """The keys of the section at that place; none where sections have no names, as in lists."""
    for part in location:
        field = getattr(kind, "model_fields", {}).get(part)
        kind = field.annotation if field else None
    return list(getattr(kind, "model_fields", []))
