"""Merge the adapter of a run into its model: a model folder that any program loads like the original one.

Design: what could stop it is checked first: the run must be trained, its weights such that can be added to, and the
model the one that the run was trained on, by the hashes that a training records, so its weights are read once for that.
Then the files of weights are written one after another into `DIR.partial`, everything else beside them, and some
questions are asked of both models. Only then does the folder get its name, so a folder DIR is complete.

A record in the folder says what the model is made of and which files of weights are complete, so the same command
continues after an interruption, and another adapter, model or type is refused. The record stays in the result. A claim
file keeps a second process away. Configurations are copied byte for byte, unless the result has another type or untied
embeddings; the index, unless its sizes or names change. Weights in other formats would be those of the untuned model,
so they are left out.

The questions are some of `data.val`, all those about images that `train.seed` draws, as for `eval.every`. They are
answered from the cache with the run's own settings and engine, first with the adapter as `lookonce eval` does, then by
the merged model. One model is in memory at a time. Nothing of this is written: these are no scores of the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from lookonce.adapter.weights import WEIGHTS, Cost, Plan, plan_merge, write_file
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.claim_file import FolderClaim
from lookonce.differences import differences
from lookonce.disk_space import check_room
from lookonce.environment import best_device, limit_cpu_threads
from lookonce.errors import CacheError, ImageError, ModelError, RecordsError, UsageError
from lookonce.eval.answers.accuracy import draw
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.scores.prediction import Prediction
from lookonce.files import TEMPORARY_MARK, atomic_write, flush, read_json, read_object, write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import claimed_around
from lookonce.run.open import Needs, OpenRun, find_run, open_run
from lookonce.run.sections import UNQUANTISED
from lookonce.text import Notify, count, listed, quiet, quoted, shell, size
from lookonce.train.model.load import PRECISIONS, load_trained, load_without_tower

ROUNDED = ("int8", "nf4")
"""The kinds of `train.frozen` whose rounding an adapter has learned to live with."""
Dtype = Literal["bf16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SPLIT = "val"
NUM_QUESTIONS = 64
NUM_SHOWN = 3
"""Questions with different answers that are printed."""
COMMAND = ("lookonce", "adapter", "merge")
ADVICE = "Make room, or choose a DIR on another disk; then run the same command again"
RECORD = "lookonce-merge.json"
CLAIM = "claim.json"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""How the names of other files of weights end, and of their indices."""
NOT_OF_MODEL = {".git", ".cache", "original", RECORD}
"""Names that are left out: what git and huggingface_hub keep, and a second copy of the weights."""
DTYPE_KEYS = ("dtype", "torch_dtype")

# What cannot be merged.


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
    parts = _parts(_read_json(folder / CONFIG))
    quantised = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if quantised is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise ModelError(
            f"{folder} is quantised (quantization_config in config.json: {method}), so nothing can be added to its "
            "weights; train on the unquantised model (model.path), with train.frozen: int8 or nf4 if memory is short, "
            "and merge that run, or load this adapter unmerged, with PEFT or vLLM"
        )


def check_target(target: Path) -> None:
    """Check that nothing is there.

    Raises:
        UsageError: something is.
    """
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists, and a merge writes into no existing folder; choose another DIR")


def check_outside(target: Path, model: Path) -> None:
    """Check that the target is not in the model's own folder, of which all files are copied.

    Raises:
        UsageError: it is.
    """
    if model.resolve() in target.resolve().parents:
        raise UsageError(f"{target} is in the folder of the model, {model}; choose another DIR")


# The folder.


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights, as the index names them.

    Raises:
        ModelError: the index is broken, or a file is missing.
    """
    names = [SINGLE]
    if (folder / INDEX).exists():
        names = sorted({*_read_json(folder / INDEX)["weight_map"].values()})
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} has no {absent[0]}; copy or download the model again")
    return [folder / name for name in names]


def other_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a model beside its weights, and those that are left out; paths relative to the folder."""
    weights = {INDEX, *(path.name for path in weight_files(folder))}
    copied, left_out = [], []
    for path in sorted(one.relative_to(folder) for one in folder.rglob("*") if one.is_file()):
        if NOT_OF_MODEL & {*path.parts}:
            left_out += [path] if path.parts[0] == "original" else []
        elif path.name.endswith(OTHER_WEIGHTS):
            left_out += [path] if str(path) not in weights else []
        else:
            copied.append(path)
    return copied, left_out


class MergeFolder:
    """The folder in which a merged model is written; a context manager that claims it."""

    def __init__(self, target: Path, made_from: Mapping[str, Any]) -> None:
        """`made_from` is what the result follows from; it is recorded, and compared when a merge is continued."""
        self.target, self.made_from = target, dict(made_from)
        self.folder = target.with_name(f"{target.name}.partial")
        self.done: dict[str, Cost] = {}
        """The complete files of weights."""
        self._claim = FolderClaim(self.folder / CLAIM, shell(*COMMAND))

    def __enter__(self) -> MergeFolder:
        """Claim the folder, and find what is complete.

        Raises:
            UsageError: it holds something else, or another process uses it.
        """
        check_target(self.target)
        self._check_record()
        if used_by := self._claim.take():
            raise UsageError(f"{self.folder} is in use by {used_by}; wait until it has ended, or stop it")
        for leftover in self.folder.rglob(f"*{TEMPORARY_MARK}*"):
            leftover.unlink(missing_ok=True)
        files = read_object(self.folder / RECORD).get("files", {})
        self.done = {name: Cost(**cost) for name, cost in files.items() if (self.folder / name).is_file()}
        return self

    def __exit__(self, *_: object) -> None:
        self._claim.__exit__()

    def note(self) -> None:
        """Record what the model is made from, and which files are done."""
        files = {name: asdict(self.done[name]) for name in sorted(self.done)}
        write_json(self.folder / RECORD, {"made_from": self.made_from, "files": files})

    def copy_others(self, source: Path, plan: Plan, dtype: str | None) -> None:
        """Copy what is beside the weights; with `dtype`, the configuration gets this type."""
        for path in other_files(source)[0]:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            if path == Path(CONFIG):
                config = _read_json(source / CONFIG)
                self._write(source / CONFIG, _configured(config, dtype, is_untied=plan.is_untied))
            else:
                _copy(source / path, self.folder / path)
        if (source / INDEX).exists():
            self._write(source / INDEX, _indexed(_read_json(source / INDEX), plan))

    def _write(self, source: Path, value: dict[str, Any]) -> None:
        """Write a JSON file of the model with another value; one with the same value keeps its bytes."""
        if value == _read_json(source):
            _copy(source, self.folder / source.name)
        else:
            write_json(self.folder / source.name, value)

    def finish(self) -> None:
        """Rename the folder to its target, after this process has released it.

        Raises:
            UsageError: the target exists by now.
        """
        for path in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            flush(path)
        check_target(self.target)
        os.rename(self.folder, self.target)
        flush(self.target.absolute().parent)

    def _check_record(self) -> None:
        if not self.folder.exists() or not any(path.name != CLAIM for path in self.folder.iterdir()):
            return
        recorded = read_object(self.folder / RECORD).get("made_from")
        if recorded is None:
            raise UsageError(f"{self.folder} exists and holds no unfinished merge; choose another DIR, or move it away")
        if found := differences(self.made_from, recorded):
            lines = [f"  {name}: this one {mine!r}, that one {theirs!r}" for name, mine, theirs in found]
            raise UsageError(
                "\n".join([f"{self.folder} holds an unfinished merge of something else, which differs in", *lines])
                + "\nchoose another DIR, or remove that folder"
            )


def _copy(source: Path, target: Path) -> None:
    with atomic_write(target) as temporary:
        shutil.copyfile(source, temporary)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = read_json(path)
        return value
    except ValueError as error:
        raise ModelError(f"{path} is broken ({error}); copy or download it again") from None


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration, and those of its parts."""
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def _configured(config: dict[str, Any], dtype: str | None, *, is_untied: bool) -> dict[str, Any]:
    """The configuration of the result: in another type, or with embeddings that are no longer tied."""
    if dtype:
        for part in _parts(config):
            part.update({key: dtype for key in DTYPE_KEYS if key in part})
        if not any(key in config for key in DTYPE_KEYS):
            config["dtype"] = dtype
    if is_untied:
        config["tie_word_embeddings"] = False
        for part in _parts(config):
            part.update({"tie_word_embeddings": False} if "tie_word_embeddings" in part else {})
    return config


def _indexed(index: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The index of the result, in the order of the model's own."""
    file_of = {one.stored.name: file for file, tensors in plan.files.items() for one in tensors}
    names = [name for name in dict.fromkeys((*index["weight_map"], *sorted(file_of))) if name in file_of]
    metadata = {**(index.get("metadata") or {}), "total_size": sum(map(plan.bytes_of, plan.files))}
    return index | {"metadata": metadata, "weight_map": {name: file_of[name] for name in names}}


# The questions.


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
        different = [
            {"question": one.question, "adapter": one.predicted, "merged": other.predicted}
            for one, other in zip(adapter, merged, strict=True)
            if one.predicted != other.predicted
        ]
        before, after = (sum(one.is_right for one in answers) / len(answers) for answers in (adapter, merged))
        return cls(len(adapter), len(different), before, after, precision, different[:NUM_SHOWN])

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


# A merge.


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
    folder, model, run = opened.folder, opened.model_folder.folder, opened.run
    check_model(model)
    check_outside(target, model)
    identity = opened.model_identity() | {"cache": opened.fingerprint.sha256}
    folder.check_inputs(identity)
    questions = draw_questions(opened, num_questions) if num_questions else None
    if num_questions and not questions:
        notify("the run has no validation records (data.val), so no questions are asked of both models")
    limit_cpu_threads(model)
    plan = plan_merge(opened.model_folder.config, weight_files(model), folder.adapter, DTYPES[dtype])
    path, hashes = Path(run.model.path).expanduser(), folder.read_trained().adapter
    made_from = identity | {  # without paths of this machine, since the folder may be published
        "model": path.name if path.is_dir() else run.model.path,
        "revision": run.model.revision,
        "run": folder.folder.absolute().name,
        "adapter": hashes[WEIGHTS],
        "adapter_config": hashes["adapter_config.json"],
        "dtype": dtype,
    }
    comparison = None
    with MergeFolder(target, made_from) as result:
        cost = _write_weights(model, result, plan, notify)
        result.copy_others(model, plan, "float32" if dtype == "fp32" else None)
        if questions:
            number = count(len(questions.asked), "question")
            notify(f"merged; asking {number} of both models (--questions 0 skips this)")
            comparison = compare(questions, folder.adapter, result.folder)
    result.finish()
    return Merged(
        folder=target,
        dtype=dtype,
        num_tensors=plan.num_tensors,
        num_changed=cost.num_tensors,
        size_bytes=sum(map(plan.bytes_of, plan.files)),
        rounding=cost.share,
        is_untied=plan.is_untied,
        left_out=list(map(str, other_files(model)[1])),
        comparison=comparison,
    )


def _write_weights(model: Path, result: MergeFolder, plan: Plan, notify: Notify) -> Cost:
    """Write the files of weights that are missing; returns the cost of all."""
    done, total = result.done, Cost()
    missing = {file: plan.bytes_of(file) for file in plan.files if file not in done}
    others = sum((model / path).stat().st_size for path in other_files(model)[0])
    check_room(result.folder, sum(missing.values()) + others, f"the merged model in {result.target}", ADVICE)
    if done:
        notify(f"continuing a merge: {len(done):,} of {count(len(plan.files), 'file')} of weights are complete")
    result.note()
    with tqdm(total=sum(missing.values()), desc="merge", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for file in plan.files:
            if file in missing:
                done[file] = write_file(model / file, result.folder / file, plan.files[file], bar.update)
                result.note()
            total.add(done[file])
    return total
