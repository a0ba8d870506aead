"""The parts of a report on where its figures come from: settings, records, versions, hashes, commands, licences."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.differences import flatten
from lookonce.errors import ModelError
from lookonce.eval.compare import FEW_IMAGES
from lookonce.eval.scores.metrics import BASELINES, NAMES
from lookonce.eval.statistics import MIN_CLUSTERS
from lookonce.hub import find_model, license_of_model
from lookonce.page import folded, sentences, subsection, table
from lookonce.plots import Content
from lookonce.report.runs import Part, ReportedRun, SplitFacts, breakable, merged, overlap
from lookonce.run.config import RunFile
from lookonce.run.sections import RECORDED, ModelSection
from lookonce.text import count, shell, shown

SETTINGS = "Settings"
DEFAULT = "default value"


def settings(runs: Sequence[ReportedRun]) -> Part:
    """What differs, and all keys of all runs to unfold."""
    known = {run.name: flatten(run.settings.model_dump(mode="json")) for run in runs if run.settings}
    if not known:
        return Part("settings", SETTINGS, "No run folder, so no settings.")
    names = list(dict.fromkeys(name for values in known.values() for name in values))
    defaults = _defaults(next(run.settings for run in runs if run.settings)) if len(known) == 1 else {}
    compared = known | ({DEFAULT: defaults} if defaults else {})
    differing = [name for name in names if len({_setting(values.get(name)) for values in compared.values()}) > 1]
    what = "What differs from the defaults." if defaults else "What differs between the runs."
    content = [_settings_table(differing, compared), folded("all settings", _settings_table(names, known))]
    numbers = {"differing": differing, "settings": known, "defaults": defaults or None}
    return Part("settings", SETTINGS, what if differing else f"{what} Nothing does.", numbers, content)


def _settings_table(names: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> Any:
    lines: list[list[Content]] = [
        [name, *(breakable(_setting(values.get(name))) for values in known.values())] for name in names
    ]
    return table(("key", *known), lines)


def _defaults(run: RunFile) -> dict[str, Any]:
    """The settings of a run file that names model, records and output, and nothing else."""
    required = {"model": {"path": run.model.path}, "data": {"train": run.data.train}, "output": run.output}
    return flatten(RunFile.model_validate(required, context=RECORDED).model_dump(mode="json"))


def _setting(value: Any) -> str:
    if value is None:
        return "none"
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 120)


DATA = "Data and leaks"


def data(runs: Sequence[ReportedRun]) -> Part:
    """A table of the splits, and sentences on each run."""
    numbers = {run.name: _data_numbers(run) for run in runs if run.settings}
    if not numbers:
        return Part("data", DATA, "No run folder, so the records are not known.")
    said = [(run.name, line) for run in runs if run.settings for line in _said(run, numbers[run.name])]
    return Part("data", DATA, "", numbers, [*_splits(runs), sentences(merged(said, len(runs)))])


def _splits(runs: Sequence[ReportedRun]) -> list[Element]:
    """A table of the splits; runs with the same splits are named together."""
    names: dict[tuple[str, SplitFacts], list[str]] = {}
    for run in runs:
        for split, one in run.data.splits.items():
            names.setdefault((split, one), []).append(run.name)
    lines = [
        (split, f"{one.num_records:,}", f"{one.num_questions:,}", f"{one.num_images:,}", ", ".join(some))
        for (split, one), some in names.items()
    ]
    return [table(("split", "records", "questions", "images", "run"), lines)] if lines else []


def _data_numbers(run: ReportedRun) -> dict[str, Any]:
    predictions = run.answers.predictions if run.answers else []
    return {
        "splits": {split: vars(one) for split, one in run.data.splits.items()},
        "problem": run.data.problem,
        "seen_in_training": overlap(predictions, run.data) if predictions and run.data.seen else None,
        "num_too_long": run.trained.get("num_too_long"),
        "prepared": dict(run.data.prepared),
    }


def _said(run: ReportedRun, numbers: dict[str, Any]) -> list[str]:
    """What is known of a run's records, a sentence each."""
    lines = [f"the records cannot be read now: {run.data.problem}"] if run.data.problem else []
    if numbers["seen_in_training"]:
        lines.append(_leak(run, numbers["seen_in_training"]))
    if numbers["num_too_long"]:
        lines.append(f"{count(numbers['num_too_long'], 'training record')} left out as too long")
    left_out = run.data.prepared.get("rows", {}).get("left_out", {})
    if left_out:
        reasons = ", ".join(f"{reason}: {number:,}" for reason, number in left_out.items())
        lines.append(f"rows that lookonce data prepare left out: {reasons}")
    return lines if run.data.problem else [*lines, _audit(run)]


def _audit(run: ReportedRun) -> str:
    """How to see more of the records than their number."""
    assert run.settings
    files = [*run.settings.data.train, *run.settings.data.val, *run.settings.data.test]
    audit = shell("lookonce", "data", "audit", *files, "--html", "audit.html")
    return f"what is in the records, and what is wrong with them: {audit}"


def _leak(run: ReportedRun, seen: dict[str, Any]) -> str:
    how = "compared by content" if seen["by_content"] else "compared by file name, which does not find renamed copies"
    if not seen["num_questions"]:
        return f"no image of {run.split} is also in training ({how})"
    others = seen["exact_match_of_others"]
    rest = "" if others is None else f"; on the others exact match is {others:.1%}"
    questions = f"{count(seen['num_questions'], 'question')} of {run.split}"
    return f"{questions} are about {count(seen['num_images'], 'image')} also in training ({how}){rest}"


PROVENANCE = "Provenance and limits"
UNKNOWN = "not recorded"
ELSEWHERE = "by another program, saved with lookonce.save_run"
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
    return Part("provenance", PROVENANCE, "", {"facts": facts, "limits": limits}, content)


def _facts(run: ReportedRun) -> dict[str, str]:
    """Names and values, as text."""
    if run.settings is None or run.folder is None:
        return {"run folder": "none, a predictions file"}
    records = run.inputs.get("records", {})
    prepared = run.data.prepared
    return {
        "run folder": str(run.folder.folder.absolute()),
        "trained": ELSEWHERE if run.was_trained_elsewhere else _dates(run),
        "device": ", ".join(run.environment.get("gpus") or ["CPU"]) if run.environment else UNKNOWN,
        **{name: version or UNKNOWN for name, version in run.environment.get("libraries", {}).items()},
        "seed": str(run.settings.train.seed),
        "features (fingerprint)": str(run.inputs.get("cache", UNKNOWN))[:DIGITS],
        "language model (hash)": str(run.inputs.get("language_model", UNKNOWN))[:DIGITS],
        **{f"{split} records (hash)": str(value)[:DIGITS] for split, value in records.items()},
        "commands": "; ".join(_commands(run, run.folder.folder)),
        "data": str(prepared.get("title", UNKNOWN)),
        "licence of the data": str(prepared.get("licence", UNKNOWN)),
        "model": str(run.settings.model.path),
        "licence of the model": _licence(run.settings.model),
    }


def _commands(run: ReportedRun, folder: Path) -> Iterator[str]:
    """The commands that make the figures again."""
    if not run.was_trained_elsewhere:
        yield shell("lookonce", "train", folder / "run.yaml")
    yield shell("lookonce", "eval", folder)


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
    if run.was_trained_elsewhere:
        yield (
            "another program trained the adapter: its steps, its time and its settings are not recorded, and "
            "the sections batch and train are not those of its training"
        )
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
