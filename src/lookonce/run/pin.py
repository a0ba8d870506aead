"""Writing `model.revision` into a run file, and leaving all else in it as it is.

Design: one line of the text is changed or added, never the file written anew, which would lose comments and order. What
comes out is read again and must say what the file said before but for that key; else nothing is written. So the ways to
write YAML that are not known here are refused and not broken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lookonce.errors import UsageError
from lookonce.files import write_text


def pin(run_file: Path, commit: str) -> bool:
    """Set `model.revision` in a run file; False if it is that already.

    Raises:
        UsageError: its text has a form in which that can not be done.
    """
    text = run_file.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    wanted = {**values, "model": {**values["model"], "revision": commit}}
    if values == wanted:
        return False
    for candidate in _candidates(text, commit):
        if _values(candidate) == wanted:
            write_text(run_file, candidate)
            return True
    raise UsageError(
        f'can not find where {run_file} says `model.path`; add to its section `model` by hand: revision: "{commit}"'
    )


def _candidates(text: str, commit: str) -> Iterator[str]:
    """The text with the revision set, in each of the ways that sections and keys are written."""
    key = f'revision: "{commit}"'
    for match in re.finditer(r"(?m)^([ \t]+)revision:[^\n#]*?([ \t]+#[^\n]*)?$", text):
        yield _replaced(text, match, f"{match[1]}{key}{match[2] or ''}")
    for match in re.finditer(r"\brevision:[^,}\n#]*", text):
        yield _replaced(text, match, key)
    for match in re.finditer(r"(?m)^([ \t]+)path:[^\n]*$", text):
        yield _replaced(text, match, f"{match[0]}\n{match[1]}{key}")
    for match in re.finditer(r"\bpath:[^,}\n#]*?(?=[ \t]*[,}])", text):
        yield _replaced(text, match, f"{match[0]}, {key}")


def _replaced(text: str, match: re.Match[str], by: str) -> str:
    return text[: match.start()] + by + text[match.end() :]


def _values(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None
