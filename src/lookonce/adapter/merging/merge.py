"""Merge the adapter of a run into its model: a model folder that any program loads like the original one.

Design: what could stop it is checked first; then the files of weights are written one after another, everything else
beside them, and some questions are asked of both models. Only then does the folder get its name. So a folder DIR is
complete, and after an interruption the same command continues with the next file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from lookonce.adapter.merging.changes import WEIGHTS, Change, read_changes
from lookonce.adapter.merging.check import check_frozen, check_model
from lookonce.adapter.merging.compare import Comparison, compare, draw_questions
from lookonce.adapter.merging.files import TensorFile
from lookonce.adapter.merging.folder import MergeFolder, check_outside, check_target, other_files, weight_files
from lookonce.adapter.merging.shards import Checkpoint, Cost, Plan, write_file
from lookonce.disk_space import check_room
from lookonce.environment import limit_cpu_threads
from lookonce.errors import CacheError, ImageError, RecordsError
from lookonce.eval.answers.questions import Questions
from lookonce.files import hash_file
from lookonce.run.claim import claimed_around
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import Needs, OpenRun, find_run, open_run
from lookonce.text import Notify, count, listed, quiet, shell, size

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
    needs = Needs(command, adapter=True, model="open")
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
        plan, changes = _plan(opened, adapter, DTYPES[dtype])
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


def _plan(opened: OpenRun, adapter: TensorFile, dtype: torch.dtype) -> tuple[Plan, dict[str, Change]]:
    checkpoint = Checkpoint(opened.model_folder.config, weight_files(opened.model_folder.folder))
    changes = read_changes(checkpoint.model, opened.folder.adapter, adapter)
    return checkpoint.plan(changes, dtype), changes


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
