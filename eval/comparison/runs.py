"""The runs to compare: their predictions, their names, and which of them are seeds of one another.

Design: two runs are seeds of one another if all that determines the training is the same but `train.seed`: the run file
without paths and settings that change no result, and the hashes of what was read. A predictions file outside a run
folder has neither. Where a training started with the adapter of another run, or has the answers of others in its
contexts, their trainings count in the same way, so that runs that need others can be seeds of one another too. A part
of the records that the seed draws (`data.where`, `data.replay`, `data.held_out`) is another one for each seed: in place
of its hashes the files count, by path.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.differences import flatten
from lookonce.errors import UsageError
from lookonce.eval.answers.files import is_begun
from lookonce.eval.scores.prediction import Prediction, read_predictions
from lookonce.files import hash_file
from lookonce.run.config import RunFile
from lookonce.run.folder import RECORD, RunFolder
from lookonce.run.start_adapter import adapter_hash, folder_of
from lookonce.text import listed, shell

SEED = "train.seed"
OF_TRAINING = {"records", "lessons", "context"}
"""Recorded inputs that are hashes of the training records, among others."""


@dataclass(frozen=True)
class Run:
    """One run's answers."""

    name: str
    predictions: list[Prediction]
    training: str
    """What determines the training, without its seed; empty if unknown."""
    seed: int | None


def read_runs(paths: Sequence[Path], split: str | None = None) -> list[Run]:
    """The runs at some paths: run folders, run files, or predictions files.

    `split` is by default each run's own `eval.split`.

    Raises:
        UsageError: the runs' own splits differ, or the predictions of a run do not exist.
        LookonceError: a path is none of these, or predictions are damaged.
    """
    folders = {path: _folder_of(path) for path in paths}
    own = {path: folder.read_run().eval.split for path, folder in folders.items() if folder and not _is_file(path)}
    if split is None and len(set(own.values())) > 1:
        said = listed([f"{path}: {name}" for path, name in own.items()])
        raise UsageError(f"the runs were evaluated on different splits ({said}); choose one with --split")
    found = []
    for path, name in zip(paths, short_names(paths), strict=True):
        folder = folders[path]
        file = path if folder is None or _is_file(path) else find_predictions(folder, split or own[path])
        found.append(Run(name, read_predictions(file), *(_training_of(folder) if folder else ("", None))))
    return found


def find_predictions(folder: RunFolder, split: str) -> Path:
    """The predictions of a split.

    Raises:
        UsageError: there are none; names the splits that were evaluated.
    """
    path = folder.predictions(split)
    if not path.exists():
        others = sorted(file.stem for file in path.parent.glob("*.jsonl") if ".partial-" not in file.name)
        what = "an unfinished evaluation" if is_begun(path.parent, split) else "no predictions"
        there = f"; there are those of {listed(others)}" if others else ""
        command = shell("lookonce", "eval", folder.folder, "--split", split)
        if folder.last_checkpoint and not folder.trained.exists():
            what = f"an unfinished training and {what}"
            command = shell("lookonce", "train", folder.folder / "run.yaml", "--resume")
        raise UsageError(f"{folder.folder} has {what} of the split {split}{there}; run: {command}")
    return path


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; a path that is there twice gets a number."""
    parts = [_named_by(path.absolute()).parts for path in paths]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        twice = {name for name, number in Counter(dict(zip(parts, names, strict=True)).values()).items() if number > 1}
        names = ["/".join(part[-depth:]) if name in twice else name for part, name in zip(parts, names, strict=True)]
    used = {*names}
    for number, name in enumerate(names):
        if name in names[:number]:
            names[number] = next(new for times in itertools.count(2) if (new := f"{name} ({times})") not in used)
            used.add(names[number])
    return names


def _is_file(path: Path) -> bool:
    return path.suffix == ".jsonl"


def _named_by(path: Path) -> Path:
    """The folder after which a run is named, or a predictions file without its suffix."""
    if _is_file(path):
        return path.parent.parent if path.parent.name == "predictions" else path.with_suffix("")
    return path.parent if path.suffix in (".yaml", ".yml") and (path.parent / RECORD).exists() else path


def _folder_of(path: Path) -> RunFolder | None:
    """The run folder of a path; None for a predictions file elsewhere."""
    if not _is_file(path):
        return RunFolder.find(path)
    above = path.absolute().parent.parent
    return RunFolder(above) if (above / RECORD).exists() else None


def _training_of(folder: RunFolder) -> tuple[str, int]:
    """What determines the training of a run folder but its seed, and the seed."""
    run = folder.read_run()
    ignored = run.keys_that_may_differ - {"eval.max_new_tokens"} | {SEED}
    settings = {name: value for name, value in flatten(run.model_dump(mode="json")).items() if name not in ignored}
    inputs = _before_the_draw(run, folder.recorded_inputs())
    if run.train.start_from:
        start = folder_of(run.train.start_from)
        if start and adapter_hash(start) == inputs.get("start"):  # it may be gone, or trained again
            inputs["start"] = _training_of(start)[0]
    if run.data.context and "answers" in inputs:
        inputs["answers"] = list(map(_origin, run.data.context.given, inputs["answers"]))
    return json.dumps([settings, inputs], sort_keys=True), run.train.seed


def _origin(path: Path, recorded: str) -> str:
    """What determines the training whose answers a file has; the recorded hash if the file is another one now."""
    folder = _folder_of(path)
    return _training_of(folder)[0] if folder and path.exists() and hash_file(path) == recorded else recorded


def _before_the_draw(run: RunFile, inputs: dict[str, Any]) -> dict[str, Any]:
    """The recorded inputs; if training records are drawn by the seed, their files in place of hashes of the draw."""
    selections = filter(None, (run.data.where, run.data.replay))
    if all(one.share == 1 for one in selections) and not run.data.held_out:
        return inputs
    files = run.data.model_dump(mode="json", include={"train", "image_root", "format", "stage_map"})
    not_drawn = {split: value for split, value in inputs.get("records", {}).items() if split != "train"}
    return {name: value for name, value in inputs.items() if name not in OF_TRAINING} | {"records": not_drawn | files}
