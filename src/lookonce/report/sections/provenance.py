"""Where the figures come from: versions, device, hashes, seeds, commands and licences; and what is not known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from lookonce.errors import ModelError
from lookonce.eval.comparison.report import FEW_IMAGES
from lookonce.eval.scores.headline import BASELINES, NAMES
from lookonce.eval.statistics.intervals import MIN_CLUSTERS
from lookonce.hub import find_model, license_of_model
from lookonce.page import sentences, subsection, table
from lookonce.plots import Content
from lookonce.report.part import Part, breakable, merged
from lookonce.report.runs import ReportedRun
from lookonce.run.sections.model import ModelSection
from lookonce.text import shell, shown

TITLE = "Provenance and limits"
UNKNOWN = "not recorded"
DIGITS = 16
"""Digits of a hash that are shown; run.json has all."""


def provenance(runs: Sequence[ReportedRun]) -> Part:
    """A line for each fact, with a column for each run; then the limits."""
    facts = {run.name: _facts(run) for run in runs}
    names = dict.fromkeys(name for one in facts.values() for name in one)
    lines: list[list[Content]] = [
        [name, *(breakable(shown(one.get(name, ""), 120)) for one in facts.values())] for name in names
    ]
    limits = merged(((run.name, line) for run in runs for line in _limits(run)), len(runs))
    content = [table(("fact", *facts), lines), *subsection("Limits", "", sentences(limits))]
    return Part("provenance", TITLE, "", {"facts": facts, "limits": limits}, content)


def _facts(run: ReportedRun) -> dict[str, str]:
    """Names and values, as text."""
    if run.settings is None or run.folder is None:
        return {"run folder": "none, a predictions file"}
    records = run.inputs.get("records", {})
    prepared = run.data.prepared
    return {
        "run folder": str(run.folder.folder.absolute()),
        "trained": _dates(run),
        "device": ", ".join(run.environment.get("gpus") or ["CPU"]) if run.environment else UNKNOWN,
        **{name: version or UNKNOWN for name, version in run.environment.get("libraries", {}).items()},
        "seed": str(run.settings.train.seed),
        "features (fingerprint)": str(run.inputs.get("cache", UNKNOWN))[:DIGITS],
        "language model (hash)": str(run.inputs.get("language_model", UNKNOWN))[:DIGITS],
        **{f"{split} records (hash)": str(value)[:DIGITS] for split, value in records.items()},
        "commands": "; ".join(
            (shell("lookonce", "train", run.folder.folder / "run.yaml"), shell("lookonce", "eval", run.folder.folder))
        ),
        "data": str(prepared.get("title", UNKNOWN)),
        "licence of the data": str(prepared.get("licence", UNKNOWN)),
        "model": str(run.settings.model.path),
        "licence of the model": _licence(run.settings.model),
    }


def _dates(run: ReportedRun) -> str:
    """When the first and the last line of the log were written."""
    times = [line["time"] for line in run.log if isinstance(line.get("time"), int | float)]
    if not times:
        return UNKNOWN
    first, last = (datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M") for moment in (times[0], times[-1]))
    return f"{first} to {last} UTC"


def _licence(model: ModelSection) -> str:
    """The licence in the model's card; nothing is downloaded."""
    folder = Path(model.path)
    with contextlib.suppress(ModelError):
        folder = folder if folder.is_dir() else find_model(str(model.path), model.revision, is_local=True)
    return license_of_model(folder) or UNKNOWN


def _limits(run: ReportedRun) -> Iterator[str]:
    """What the figures of a run do not show."""
    if run.answers is None or run.scores is None:
        return
    if run.scores.num_images < MIN_CLUSTERS:
        yield FEW_IMAGES
    if missing := [NAMES[key] for key in BASELINES if key not in run.metrics["baselines"]]:
        yield f"not measured: {', '.join(missing)}"
    if run.split == "val":
        yield "val is not a final test: epochs or settings may have been chosen by it"
    if not all(one.image_keys or not one.images for one in run.answers.predictions):
        yield "predictions of an earlier version, without image keys: images are compared by their paths"
    if run.settings:
        yield "an interval holds the chance of the images, not that of training; train each variant with several seeds"
