"""The runs to compare: their predictions, their names, and which of them are seeds of one another.

Design: two runs are seeds of one another if all that determines the training is the same but `train.seed`: the run file
without paths and settings that change no result, and the hashes of what was read. A predictions file outside a run
folder has neither. Where a training started with the adapter of another run, that run's training counts in the same
way, so that chains of runs can be seeds of one another too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lookonce.differences import flatten
from lookonce.errors import UsageError
from lookonce.eval.answers.partial import is_begun
from lookonce.eval.scores.prediction import Prediction, read_predictions
from lookonce.run.folder import HARMLESS, RECORD, RunFolder
from lookonce.run.start_adapter import adapter_hash
from lookonce.text import listed

SEED = "train.seed"
IGNORED = HARMLESS - {"eval.max_new_tokens"} | {SEED}
"""Keys of the run file that do not tell two trainings apart."""


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
        raise UsageError(
            f"{folder.folder} has {what} of the split {split}{there}; "
            f"run: lookonce eval {folder.folder} --split {split}"
        )
    return path


def short_names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; a path that is there twice gets a number."""
    parts = [_named_by(path.absolute()).parts for path in paths]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        twice = {name for name, number in Counter(dict(zip(parts, names, strict=True)).values()).items() if number > 1}
        names = ["/".join(part[-depth:]) if name in twice else name for part, name in zip(parts, names, strict=True)]
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        names[number] = f"{name} ({seen[name]})" if seen[name] > 1 else name
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
    settings = {name: value for name, value in flatten(run.model_dump(mode="json")).items() if name not in IGNORED}
    inputs = folder.recorded_inputs()
    if run.train.start_from:
        start = RunFolder.find(run.train.start_from)
        is_there = adapter_hash(start) == inputs.get("start")  # it may be gone, or trained again
        inputs["start"] = _training_of(start)[0] if is_there else inputs.get("start")
    return json.dumps([settings, inputs], sort_keys=True), run.train.seed
