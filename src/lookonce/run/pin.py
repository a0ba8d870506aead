"""Write `model.revision` into a run file and leave the rest of its text unchanged.

Design: PyYAML says where in the text each value stands, so only that value is replaced, or one line added; comments,
order and spaces stay. The result is parsed again and must differ in that key alone, otherwise nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lookonce.errors import UsageError
from lookonce.files import write_text


def pin(run_file: Path, commit: str) -> bool:
    """Set `model.revision` in a run file; False if it is set to this commit already.

    Raises:
        UsageError: the section `model` is shared by an alias or merged from another, so it cannot be edited alone.
    """
    text = run_file.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    wanted = {**values, "model": {**values["model"], "revision": commit}}
    if values == wanted:
        return False
    try:
        pinned = _with_revision(text, commit)
        is_as_wanted = yaml.safe_load(pinned) == wanted
    except (KeyError, ValueError, yaml.YAMLError):  # `path` is merged from elsewhere, or `model` occurs twice
        is_as_wanted = False
    if not is_as_wanted:
        raise UsageError(f'cannot edit {run_file}; add to its section `model` by hand: revision: "{commit}"')
    write_text(run_file, pinned)
    return True


def _with_revision(text: str, commit: str) -> str:
    root: Any = yaml.compose(text)
    [model] = [value for key, value in root.value if key.value == "model"]
    keys = {key.value: (key, value) for key, value in model.value}
    if "revision" in keys:
        old = keys["revision"][1]
        start, end, new = old.start_mark.index, old.end_mark.index, f'"{commit}"'
        return f"{text[:start]}{' ' if start == end else ''}{new}{text[end:]}"  # an empty value stands at the colon
    key, path = keys["path"]
    end = path.end_mark.index
    if model.flow_style:
        return f'{text[:end]}, revision: "{commit}"{text[end:]}'
    end = text.find("\n", end) if "\n" in text[end:] else len(text)  # after a comment on the line
    return f'{text[:end]}\n{" " * key.start_mark.column}revision: "{commit}"{text[end:]}'
