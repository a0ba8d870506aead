"""The answers of several runs to the same questions: read, joined by question, and routed.

Q questions, R runs.

Two runs are seeds of one another if all that determines the training is the same but `train.seed`: the run file without
paths and settings that change no result, and the hashes of what was read. The training of an adapter that was started
from, or of answers in the contexts, counts in the same way. Where the seed draws a part of the records (`data.where`,
`data.replay`, `data.held_out`), the paths of the files count and not their hashes.

Runs are joined by image key, question and turn, and refused if these differ, since a difference may come from the
questions. References, the questions before it, and last where its record was read from identify a question that is
asked twice about an image.

To route is to take the answer to each question from one of several runs, such as that trained on its stage. Each run
has answered all questions, so no model is loaded.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import RunFolderError, UsageError
from lookonce.eval.answers.files import is_begun
from lookonce.eval.scores.metric import EXACT, Scorer, name_of
from lookonce.eval.scores.metrics import read_headline
from lookonce.eval.scores.prediction import Prediction, is_exact_match_poor, read_predictions
from lookonce.eval.statistics import Clusters, clusters_of
from lookonce.files import hash_file
from lookonce.run.config import RunFile
from lookonce.run.folder import RECORD, RunFolder
from lookonce.run.start_adapter import adapter_hash, folder_of
from lookonce.settings import flatten
from lookonce.text import count, listed, nfc, quoted, shell, short_ends

SEED = "train.seed"
OF_TRAINING = {"records", "stages", "lessons", "context"}
"""Recorded inputs that are hashes of the training records, among others; 0.3 recorded stages as `lessons`."""


@dataclass(frozen=True)
class Run:
    name: str
    predictions: list[Prediction]
    training: str
    """What determines the training, without its seed; empty if unknown."""
    seed: int | None
    metric: str = EXACT
    """The metric that counted in its evaluation."""


def read_runs(paths: Sequence[Path], split: str | None = None) -> list[Run]:
    """The runs at some paths: run folders, run files, or predictions files.

    `split` is by default each run's own `eval.split`.

    Raises:
        UsageError: the runs' own splits differ, or the predictions of a run do not exist.
        LookonceError: a path is none of these, or predictions are damaged.
    """
    folders = {path: folder_at(path) for path in paths}
    split_of = {path: folder.read_run().eval.split for path, folder in folders.items() if folder and not is_file(path)}
    check_splits({str(path): split or of_run for path, of_run in split_of.items()})
    runs = []
    for path, name in zip(paths, short_names(paths), strict=True):
        folder = folders[path]
        file = find_predictions(folder, split or split_of[path]) if folder and path in split_of else path
        runs.append(read_file(name, file, folder))
    return runs


def read_file(name: str, file: Path, folder: RunFolder | None) -> Run:
    """The run with the answers of a predictions file; `folder` is the run folder that it belongs to, if any."""
    if folder is None:
        return Run(name, read_predictions(file), "", None)
    return Run(name, read_predictions(file), *_training_of(folder), _metric_of(folder, file))


def _metric_of(folder: RunFolder, file: Path) -> str:
    """The metric that counted when the answers of a file were evaluated, or would count now if its result is lost."""
    if file.absolute() != folder.predictions(file.stem).absolute():
        return EXACT
    try:
        head = read_headline(folder, file.stem)
    except RunFolderError:
        head = None
    return head.metric if head else folder.read_run().eval.metric


def check_splits(splits: Mapping[str, str]) -> None:
    """Check that the splits of some runs, by the runs' names, are one; raises UsageError if they differ."""
    if len({*splits.values()}) > 1:
        splits_by_run = listed([f"{run}: {split}" for run, split in splits.items()])
        raise UsageError(f"the runs were evaluated on different splits ({splits_by_run}); choose one with --split")


def find_predictions(folder: RunFolder, split: str) -> Path:
    """The predictions of a split; if there are none, raises UsageError with the splits that were evaluated."""
    path = folder.predictions(split)
    if not path.exists():
        other_splits = sorted(file.stem for file in path.parent.glob("*.jsonl") if ".partial-" not in file.name)
        problem = "an unfinished evaluation" if is_begun(path.parent, split) else "no predictions"
        hint = f"; there are those of {listed(other_splits)}" if other_splits else ""
        command = shell("lookonce", "eval", folder.folder, "--split", split)
        if folder.last_checkpoint and not folder.trained.exists():
            problem = f"an unfinished training and {problem}"
            command = shell("lookonce", "train", folder.folder / "run.yaml", "--resume")
        raise UsageError(f"{folder.folder} has {problem} of the split {split}{hint}; run: {command}")
    return path


def short_names(paths: Sequence[Path]) -> list[str]:
    """Short names of runs, after their folders; a path that is there twice gets a number."""
    names = short_ends([_named_by(path.absolute()) for path in paths])
    used = {*names}
    for number, name in enumerate(names):
        if name in names[:number]:
            names[number] = next(new for times in itertools.count(2) if (new := f"{name} ({times})") not in used)
            used.add(names[number])
    return names


def is_file(path: Path) -> bool:
    """Whether a path is a predictions file."""
    return path.suffix == ".jsonl"


def _named_by(path: Path) -> Path:
    """The folder after which a run is named, or a predictions file without its suffix."""
    if is_file(path):
        return path.parent.parent if path.parent.name == "predictions" else path.with_suffix("")
    return path.parent if path.suffix in (".yaml", ".yml") and (path.parent / RECORD).exists() else path


def folder_at(path: Path) -> RunFolder | None:
    """The run folder of a path; None for a predictions file elsewhere."""
    if not is_file(path):
        return RunFolder.find(path)
    above = path.absolute().parent.parent
    return RunFolder(above) if (above / RECORD).exists() else None


def _training_of(folder: RunFolder) -> tuple[str, int | None]:
    """What determines the training of a run folder but its seed, and the seed.

    Of a training elsewhere nothing is known but the adapter, so no other run is a seed of it.
    """
    run = folder.read_run()
    if folder.was_trained_elsewhere:
        return json.dumps(folder.read_trained().adapter, sort_keys=True), None
    ignored = run.keys_that_may_differ - {"eval.max_new_tokens"} | {SEED}
    settings = {name: value for name, value in flatten(run.model_dump(mode="json")).items() if name not in ignored}
    inputs = _inputs_before_draw(run, folder.recorded_inputs())
    if run.train.start_from:
        start = folder_of(run.train.start_from)
        if start and adapter_hash(start) == inputs.get("start"):  # it may be gone, or trained again
            inputs["start"] = _training_of(start)[0]
    if run.data.context and "answers" in inputs:
        inputs["answers"] = list(map(_origin, run.data.context.prediction_files, inputs["answers"]))
    return json.dumps([settings, inputs], sort_keys=True), run.train.seed


def _origin(path: Path, recorded: str) -> str:
    """What determines the training whose answers a file has; the recorded hash if the file is another one now."""
    folder = folder_at(path)
    return _training_of(folder)[0] if folder and path.exists() and hash_file(path) == recorded else recorded


def _inputs_before_draw(run: RunFile, inputs: dict[str, Any]) -> dict[str, Any]:
    """The recorded inputs; if training records are drawn by the seed, their files in place of hashes of the draw."""
    selections = filter(None, (run.data.where, run.data.replay))
    if all(selection.share == 1 for selection in selections) and not run.data.held_out:
        return inputs
    files = run.data.model_dump(mode="json", include={"train", "image_root", "format", "stage_map"})
    not_drawn = {split: value for split, value in inputs.get("records", {}).items() if split != "train"}
    return {name: value for name, value in inputs.items() if name not in OF_TRAINING} | {"records": not_drawn | files}


QuestionKey = tuple[tuple[str, ...], str, int]
"""Images, question, turn."""
Key = tuple[tuple[str, ...], str, int, int]
"""The same, and a number that tells questions apart for which it is the same."""
MOST = 3
"""Examples in a message."""


@dataclass(frozen=True)
class Joined:
    """The answers of some runs to the same questions."""

    right_QR: NDArray[np.float64]
    """Whether each question is answered right by each run: 1 or 0."""
    score_QR: NDArray[np.float64]
    """What the answers score by the metric, to the questions to which it applies; with exact match the same."""
    majority_QR: NDArray[np.float64]
    """What the majority answers score. Runs with other training records have other ones."""
    clusters: Clusters
    """The cluster of each of these questions."""
    is_exact_match_poor: bool


def join(runs: Sequence[Run], metric: str = EXACT) -> Joined:
    """What the answers of each run score by a metric, in one order.

    Raises:
        UsageError: they answered different questions, or were scored with different references, and the differences are
            named; or the metric applies to none of the questions.
    """
    rows = in_one_order(runs)
    scorers = [Scorer(row, metric) for row in rows]  # of the same questions; with other majority answers
    if not scorers[0].rows:
        raise UsageError(f"{name_of(metric)} applies to none of the questions; compare by another metric: --metric")
    right_RQ = [[prediction.is_right for prediction in row] for row in rows]
    score_RQ, majority_RQ = (
        [score([getattr(one, name) for one in row]) for score, row in zip(scorers, rows, strict=True)]
        for name in ("predicted", "majority")
    )
    return Joined(
        np.array(right_RQ, dtype=np.float64).T,
        np.array(score_RQ).T,
        np.array(majority_RQ).T,
        clusters_of([prediction.sources for prediction in scorers[0].rows]),
        is_exact_match_poor(rows),
    )


def in_one_order(runs: Sequence[Run]) -> list[list[Prediction]]:
    """The predictions of each run, in the order of the first one's.

    Raises:
        UsageError: they answered different questions, or were scored with different references; names the differences.
    """
    keyed = _by_key(runs)
    differences: list[str] = []
    for run, by_key in zip(runs[1:], keyed[1:], strict=True):
        differences += _differences(runs[0].name, keyed[0], run.name, by_key)
    if differences:
        raise UsageError(
            "\n".join(["the runs cannot be compared, because they answered different questions:", *differences])
            + "\nevaluate them on the same records, with: lookonce eval RUN --split SPLIT"
        )
    return [[by_key[key] for key in keyed[0]] for by_key in keyed]


def _by_key(runs: Sequence[Run]) -> list[dict[Key, Prediction]]:
    """The predictions of each run by their keys, in their order.

    Paths of images without keys, and system texts, tell questions apart where all runs have the same: images may have
    been moved, and a run file may have a system text for all.
    """

    def agree(of: Callable[[Prediction], Any]) -> bool:
        first, *others = (Counter((nfc(row.question), row.turn, of(row)) for row in run.predictions) for run in runs)
        return all(other == first for other in others)

    with_paths = agree(lambda row: row.image_keys or row.images)
    with_system = agree(lambda row: row.system)
    keyed = []
    for run in runs:
        numbers_of: dict[QuestionKey, list[int]] = {}
        for number, row in enumerate(run.predictions):
            images = row.image_keys or (row.images if with_paths else ())
            numbers_of.setdefault((images, nfc(row.question), row.turn), []).append(number)
        told_apart = [  # from another question with the same text; own answers before it are others in each run
            (
                sorted(_references(row)),
                [nfc(turn.question) for turn in row.earlier],
                (row.system or "") if with_system else "",
                _place(row),
            )
            for row in run.predictions
        ]
        keys: dict[int, Key] = {}
        for question_key, numbers in numbers_of.items():
            numbers.sort(key=told_apart.__getitem__)
            keys |= {number: (*question_key, index) for index, number in enumerate(numbers)}
        keyed.append({keys[number]: row for number, row in enumerate(run.predictions)})
    return keyed


def _place(row: Prediction) -> tuple[str, int]:
    """The file and the line that a question is from."""
    line = row.origin[len(row.origin.rstrip("0123456789")) :]
    return row.origin.removesuffix(line), int(line or 0)


def _differences(
    name: str, predictions: dict[Key, Prediction], other_name: str, other_predictions: dict[Key, Prediction]
) -> Iterator[str]:
    """What differs between the questions of two runs: a line each, with a number and some examples."""
    for lacking, present, has, rows in (
        (other_name, other_predictions, name, predictions),
        (name, predictions, other_name, other_predictions),
    ):
        if absent := [row for key, row in rows.items() if key not in present]:
            yield f"  {lacking} lacks {count(len(absent), 'question')} of {has}: {_examples(absent)}"
    scored = [(row, other_predictions[key]) for key, row in predictions.items() if key in other_predictions]
    if changed := [row for row, other in scored if _references(row) != _references(other)]:
        references = f"the references of {count(len(changed), 'question')}"
        yield f"  {references} differ from {name} to {other_name}: {_examples(changed)}"


def _references(prediction: Prediction) -> set[str]:
    return {nfc(text).strip() for text in (prediction.answer, *prediction.references)}


def _examples(predictions: Sequence[Prediction]) -> str:
    return listed([f"{quoted(prediction.question, 50)} ({prediction.origin})" for prediction in predictions], MOST)


Label = Literal["stage", "category", "source"]
"""The labels of a question that are in its prediction."""


def route(runs: Mapping[str, Run], by: Label) -> list[Prediction]:
    """The prediction of each question by the run of its label, in the order of the first run; `runs` are by label.

    Raises:
        UsageError: the runs answered different questions, or questions have a label without a run.
    """
    rows = dict(zip(map(nfc, runs), in_one_order(list(runs.values())), strict=True))
    labels = [getattr(row.in_nfc, by) for row in next(iter(rows.values()))]
    check_labels(labels, list(rows), by)
    return [rows[label][number] for number, label in enumerate(labels)]


def check_labels(labels: Sequence[str | None], with_run: Sequence[str], by: Label) -> None:
    """Check that there is a run for the label of each question; raises UsageError with the labels that have none."""
    if unrouted := Counter(label for label in labels if label not in with_run):
        named = [f"{f'{by} {label}' if label else f'no {by}'} ({number:,})" for label, number in unrouted.items()]
        raise UsageError(
            f"{unrouted.total():,} of {count(len(labels), 'question')} have no run to answer them: {listed(named)}; "
            f"there are runs for {by} {listed(with_run)}; name one for each {by}"
        )
