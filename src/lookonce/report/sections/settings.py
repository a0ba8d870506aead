"""The settings: what differs between the runs, or of one run what differs from the defaults; then all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lookonce.differences import flatten
from lookonce.page import folded, table
from lookonce.plots import Content
from lookonce.report.part import Part, breakable
from lookonce.report.runs import ReportedRun
from lookonce.run.config import RunFile
from lookonce.run.sections.paths import RECORDED
from lookonce.text import shown

TITLE = "Settings"
DEFAULT = "default value"


def settings(runs: Sequence[ReportedRun]) -> Part:
    """What differs, and all keys of all runs to unfold."""
    known = {run.name: flatten(run.settings.model_dump(mode="json")) for run in runs if run.settings}
    if not known:
        return Part("settings", TITLE, "No run folder, so no settings.")
    names = list(dict.fromkeys(name for values in known.values() for name in values))
    defaults = _defaults(next(run.settings for run in runs if run.settings)) if len(known) == 1 else {}
    compared = known | ({DEFAULT: defaults} if defaults else {})
    differing = [name for name in names if len({_text(values.get(name)) for values in compared.values()}) > 1]
    what = "What differs from the defaults." if defaults else "What differs between the runs."
    content = [_table(differing, compared), folded("all settings", _table(names, known))]
    numbers = {"differing": differing, "settings": known, "defaults": defaults or None}
    return Part("settings", TITLE, what if differing else f"{what} Nothing does.", numbers, content)


def _table(names: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> Any:
    lines: list[list[Content]] = [
        [name, *(breakable(_text(values.get(name))) for values in known.values())] for name in names
    ]
    return table(("key", *known), lines)


def _defaults(run: RunFile) -> dict[str, Any]:
    """The settings of a run file that names model, records and output, and nothing else."""
    required = {"model": {"path": run.model.path}, "data": {"train": run.data.train}, "output": run.output}
    return flatten(RunFile.model_validate(required, context=RECORDED).model_dump(mode="json"))


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 120)
