"""Merge the adapter of a run into its model: a model folder that any program loads like the original one.

Design: what could stop it is checked first: the run must be trained, its weights such that can be added to, and the
model the one that the run was trained on, by the hashes that a training records, so its weights are read once for that.
Then the files of weights are written one after another, everything else beside them, and some questions are asked of
both models. Only then does the folder get its name. So a folder DIR is complete, and after an interruption the same
command continues with the next file.

The questions are some of `data.val`, all those about images that `train.seed` draws, as for `eval.every`. They are
answered from the cache with the run's own settings and engine, first with the adapter as `lookonce eval` does, then by
the merged model. One model is in memory at a time. Nothing of this is written: these are no scores of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from lookonce.adapter.merged_folder import (
    Checkpoint,
    Cost,
    MergeFolder,
    Plan,
    check_outside,
    check_target,
    other_files,
    weight_files,
    write_file,
)
from lookonce.adapter.weights import WEIGHTS, Change, TensorFile, read_changes
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.disk_space import check_room
from lookonce.environment import best_device, limit_cpu_threads
from lookonce.errors import CacheError, ImageError, ModelError, RecordsError, UsageError
from lookonce.eval.answers.accuracy import draw
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.scores.prediction import Prediction
from lookonce.files import hash_file, read_json
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder, claimed_around
from lookonce.run.open import Needs, OpenRun, find_run, open_run
from lookonce.run.sections import UNQUANTISED
from lookonce.text import Notify, count, listed, quiet, quoted, shell, size
from lookonce.train.model.load import PRECISIONS, load_trained, load_without_tower

ROUNDED = ("int8", "nf4")
"""The kinds of `train.frozen` whose rounding an adapter has learned to live with."""


def check_frozen(run: RunFile, command: str, *, allows_unquantised: bool) -> None:
    """Check that the adapter was trained on the weights that it is merged into; `command` is the one that was given.

    Raises:
        UsageError: they were quantised; names the ways.
    """
    frozen = run.train.frozen
    if frozen in ROUNDED and not allows_unquantised:
        raise UsageError(
            f"the adapter was trained on weights quantised to {frozen}, which cannot be stored merged; merged into the "
            f"unquantised ones it gives other answers. To do that and count other answers: {command} "
            "--onto-unquantised\n"
            f"Otherwise load the adapter unmerged, with PEFT, or train again with train.frozen: {UNQUANTISED}"
        )


def check_model(folder: Path) -> None:
    """Check that a model's files are not quantised.

    Raises:
        ModelError: they are; names the ways.
    """
    config = read_json(folder / "config.json")
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    quantised = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if quantised is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ModelError(
            f"{folder} is quantised (quantization_config in config.json: {method}), so nothing can be added to its "
            "weights; train on the unquantised model (model.path), with train.frozen: int8 or nf4 if memory is short, "
            "and merge that run, or load this adapter unmerged, with PEFT or vLLM"
        )


SPLIT = "val"
NUM_SHOWN = 3
"""Questions with different answers that are printed."""


@dataclass(frozen=True)
class Comparison:
    """Answers of the adapter and of the merged model to the same questions."""

    num_questions: int
    num_different: int
    """Questions with different answers."""
    adapter: float
    """Share of right answers (exact match) of the model with its adapter."""
    merged: float
    """The same of the merged model."""
    precision: str
    """`train.precision`, in which both answered."""
    different: list[dict[str, str]]
    """Some of the questions with different answers, with both."""

    @classmethod
    def of(cls, adapter: list[Prediction], merged: list[Prediction], precision: str) -> Comparison:
        """Compare answers to the same questions, of which there is at least one."""
        pairs = [(one, other) for one, other in zip(adapter, merged, strict=True) if one.predicted != other.predicted]
        shown = [
            {"question": one.question, "adapter": one.predicted, "merged": other.predicted}
            for one, other in pairs[:NUM_SHOWN]
        ]
        return cls(len(adapter), len(pairs), _score(adapter), _score(merged), precision, shown)

    def lines(self) -> list[str]:
        """For people: how many answers differ, and both scores."""
        return [
            f"  answers     {self.num_different:,} of {self.num_questions:,} differ ({SPLIT}, in {self.precision})",
            f"  exact match {self.adapter:.1%} with the adapter, {self.merged:.1%} merged",
            *(
                f"    {quoted(one['question'])}: {quoted(one['adapter'])}, merged {quoted(one['merged'])}"
                for one in self.different
            ),
        ]


def _score(answers: list[Prediction]) -> float:
    return sum(one.is_right for one in answers) / len(answers)


def draw_questions(opened: OpenRun, most: int) -> Questions | None:
    """At most `most` validation questions of a run; None if it has none."""
    records = opened.records[SPLIT]
    if not records:
        return None
    keys = [[opened.key_of(path) for path in record.images] for record in records]
    drawn = draw(records, keys, most, opened.run.train.seed)
    return Questions.of(opened.changed(records={**opened.records, SPLIT: drawn}), SPLIT)


def compare(questions: Questions, adapter: Path, merged: Path) -> Comparison:
    """Ask both models; `merged` is a model folder.

    Raises:
        LookonceError: a model cannot be loaded, or its memory does not suffice.
    """
    opened = questions.opened
    answering = opened.run.eval.model_copy(update={"frozen": None})  # weights as in training, or not quantised
    run = opened.run.model_copy(update={"eval": answering})
    before = _answers(questions, partial(load_trained, opened.model_folder, run, adapter))
    after = _answers(questions, partial(_load_merged, run, merged))
    return Comparison.of(before, after, run.train.precision)


def _load_merged(run: RunFile, merged: Path) -> Any:
    folder = ModelFolder.open(str(merged), is_local=True)
    dtype = PRECISIONS[run.train.precision]
    return load_without_tower(folder, dtype, run.model.attention, UNQUANTISED).to(best_device()).eval()


def _answers(questions: Questions, load: Callable[[], Any]) -> list[Prediction]:
    """The answers of a model, stage by stage; its memory is free again afterwards."""
    model, answers = load(), dict[int, Answer]()
    for number, stage in enumerate(questions.stages):
        part = questions.at_stage(number, answers)
        found = part.of_questions(dict(part.answer(model, range(len(part.batches)))))
        answers |= {stage[place]: answer for place, answer in found.items()}
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return questions.after_all(answers).predictions(answers)


Dtype = Literal["bf16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUM_QUESTIONS = 64
COMMAND = ("lookonce", "adapter", "merge")
ADVICE = "Make room, or choose a DIR on another disk; then run the same command again"


@dataclass(frozen=True)
class Merged:
    """A merged model."""

    folder: Path
    dtype: Dtype
    """The type of the tensors that the adapter changes."""
    num_tensors: int
    num_changed: int
    size_bytes: int
    """The size of all tensors."""
    rounding: float
    """What rounding changed, as a share of what the adapter changes: a ratio of Frobenius norms."""
    is_untied: bool
    """Whether tied embeddings have become two tensors."""
    left_out: list[str]
    """Files of weights in other formats, which were not copied."""
    comparison: Comparison | None
    """None if no questions were asked."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """For people."""
        untied = "; embeddings and output layer are two tensors now" if self.is_untied else ""
        left_out = [f"  left out    {listed(self.left_out)} (weights of the untuned model)"] if self.left_out else []
        return "\n".join(
            [
                f"merged model in {self.folder}: {size(self.size_bytes)}",
                f"  changed     {self.num_changed:,} of {count(self.num_tensors, 'tensor')}, in {self.dtype}{untied}",
                f"  rounding    {self.rounding:.2%} of what the adapter changes",
                *left_out,
                *(self.comparison.lines() if self.comparison else []),
            ]
        )


def merge(
    place: Path,
    target: Path,
    dtype: Dtype = "bf16",
    num_questions: int = NUM_QUESTIONS,
    *,
    onto_unquantised: bool = False,
    notify: Notify = quiet,
) -> Merged:
    """Merge the adapter of a trained run, by its folder or run file, into a new model folder.

    At most `num_questions` validation questions are asked of both models.

    Raises:
        LookonceError: the run is not trained, its model has changed or is quantised, or the target exists.
    """
    check_target(target)
    command = shell(*COMMAND)
    needs = Needs(command, adapter=True, recorded=True, model="open")
    if num_questions:
        needs = replace(needs, records="used", images="cached", cache=True)
    with claimed_around(target, command):
        _, run = find_run(place, (), needs)
        check_frozen(run, shell(*COMMAND, place, target), allows_unquantised=onto_unquantised)
        with _opened(place, needs, notify) as opened:
            return _merge(opened, target, dtype, num_questions, notify)


def _opened(place: Path, needs: Needs, notify: Notify) -> OpenRun:
    """The run, and its cache for the questions."""
    try:
        opened = open_run(place, needs, notify=notify)
        if needs.cache:
            opened.cache  # noqa: B018  (what it lacks is said before anything is written)
        return opened
    except (CacheError, ImageError, RecordsError) as error:
        raise type(error)(f"{error}\n(--questions 0 merges without asking both models, and needs no cache)") from None


def _merge(opened: OpenRun, target: Path, dtype: Dtype, num_questions: int, notify: Notify) -> Merged:
    """The same of an open run."""
    folder, model = opened.folder, opened.model_folder.folder
    check_model(model)
    check_outside(target, model)
    identity = opened.model_identity() | {"cache": opened.fingerprint.sha256}
    folder.check_inputs(identity)
    questions = draw_questions(opened, num_questions) if num_questions else None
    if num_questions and not questions:
        notify("the run has no validation records (data.val), so no questions are asked of both models")
    limit_cpu_threads(model)
    made_from = identity | _sources(folder, opened.run) | {"dtype": dtype}
    with MergeFolder(target, made_from) as result, TensorFile(folder.adapter / WEIGHTS) as adapter:
        checkpoint = Checkpoint(opened.model_folder.config, weight_files(model))
        changes = read_changes(checkpoint.model, folder.adapter, adapter)
        plan = checkpoint.plan(changes, DTYPES[dtype])
        cost = _write(model, result, plan, changes, notify)
        result.copy_others(model, plan, "float32" if dtype == "fp32" else None)
        comparison = _compare(questions, folder, result, notify)
    result.finish()
    left_out = [str(path) for path in other_files(model)[1]]
    total = sum(map(plan.bytes_of, plan.files))
    changed = cost.num_tensors, total, cost.share
    return Merged(target, dtype, plan.num_tensors, *changed, plan.is_untied, left_out, comparison)


def _sources(folder: RunFolder, run: RunFile) -> dict[str, Any]:
    """Names and hashes of what is merged. Paths of this machine do not belong into a folder that may be published."""
    path = Path(run.model.path).expanduser()
    return {
        "model": path.name if path.is_dir() else run.model.path,
        "revision": run.model.revision,
        "run": folder.folder.absolute().name,
        "adapter": hash_file(folder.adapter / WEIGHTS),
        "adapter_config": hash_file(folder.adapter / "adapter_config.json"),
    }


def _write(model: Path, result: MergeFolder, plan: Plan, changes: Mapping[str, Change], notify: Notify) -> Cost:
    """Write the files of weights that are missing; returns the cost of all."""
    done = result.done
    missing = {file: plan.bytes_of(file) for file in plan.files if file not in done}
    others = sum((model / path).stat().st_size for path in other_files(model)[0])
    check_room(result.folder, sum(missing.values()) + others, f"the merged model in {result.target}", ADVICE)
    if done:
        notify(f"continuing a merge: {len(done):,} of {count(len(plan.files), 'file')} of weights are complete")
    result.note()
    total = Cost()
    with tqdm(total=sum(missing.values()), desc="merge", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for file in plan.files:
            if file in missing:
                done[file] = write_file(model / file, result.folder / file, plan.files[file], changes, bar.update)
                result.note(file, done[file])
            total.add(done[file])
    return total


def _compare(questions: Questions | None, folder: RunFolder, result: MergeFolder, notify: Notify) -> Comparison | None:
    if questions is None:
        return None
    notify(f"merged; asking {count(len(questions.asked), 'question')} of both models (--questions 0 skips this)")
    return compare(questions, folder.adapter, result.folder)
