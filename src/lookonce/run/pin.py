"""Write commits of the Hub into a run file (`model.revision`, `train.start_from`) and leave its other text unchanged.

Design: PyYAML says where in the text each value stands, so only that value is replaced, or one line added; comments,
order and spaces stay. The result is parsed again and must differ in that key alone, otherwise nothing is written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from lookonce.errors import UsageError
from lookonce.files import write_text
from lookonce.run.sections.start import SCHEME, HubAdapter, hub_adapter


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


def pin_start(run_file: Path, name: str, commit: str) -> bool:
    """Set the commit of the adapter `name` in `train.start_from`; False if it is set to this commit already.

    Raises:
        UsageError: the run file does not name this adapter, or its value cannot be edited alone.
    """
    text, pinned = run_file.read_text(encoding="utf-8"), str(HubAdapter(name, commit))
    values: Any = yaml.safe_load(text)
    start = hub_adapter(values.get("train", {}).get("start_from"))
    if start is not None and str(start) == pinned:
        return False
    edited = re.sub(rf"{SCHEME}{re.escape(name)}(@[\w./-]+)?(?![\w./@-])", lambda found: pinned, text)
    if start is None or start.name != name or yaml.safe_load(edited) != _with_start(values, pinned):
        raise UsageError(f'cannot edit {run_file}; set in its section `train` by hand: start_from: "{pinned}"')
    write_text(run_file, edited)
    return True


def _with_start(values: dict[str, Any], start: str) -> dict[str, Any]:
    return {**values, "train": {**values["train"], "start_from": start}}


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
