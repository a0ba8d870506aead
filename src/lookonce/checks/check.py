"""Check a run file: everything that would stop the run later, or surprise, all at once and in seconds.

Design: each check finds out as much as it can and leaves out what depends on something that is broken. Nothing is
downloaded, no GPU is needed and no weights are read. A wrong value in the run file is taken out, and its default stands
for it, so that the rest can be checked too; a variable that is not set stays in its path. Without a value that is
required, the check ends there, before torch is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lookonce.cache.format import STORAGE
from lookonce.checks.report import CheckReport, Level, Result
from lookonce.claim_file import holder, is_living
from lookonce.disk_space import existing, free_bytes, with_margin
from lookonce.environment import LAUNCH, MPI, gpu_gb, launch_note
from lookonce.errors import LookonceError, RunFolderError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import CLAIM, NUM_CHECKPOINTS, RunFolder
from lookonce.run.sections import RECORDED, UNQUANTISED
from lookonce.run.start_adapter import find_start, start_identity
from lookonce.settings import explain, load_values, set_key
from lookonce.text import first_line, shell, size
from lookonce.train.model.gpu_memory import BYTES, fits, logits_gb, measured_name, peak_gb, usable_gb

if TYPE_CHECKING:
    from lookonce.checks.inputs import CheckedImages, CheckedModel


REPEATS = 4
"""How often wrong values are taken out: only without them it is seen whether the others fit together."""


def check_run_file(path: Path, assignments: Sequence[str] = ()) -> tuple[RunFile | None, list[Result]]:
    """The run, with defaults for values that are wrong, and a result for each mistake; no run if it cannot be known."""
    try:
        values = load_values(path, f"run file {path}", "lookonce init writes one", "a mapping of sections")
        for assignment in assignments:
            set_key(values, assignment)
    except UsageError as error:
        return None, [_error(str(error))]
    problems, mistakes = _problems(values), list[str]()
    if not problems:
        return RunFile.model_validate(values), [Result("ok", "run file", str(path))]
    for _ in range(REPEATS):
        mistakes += [explain(problem, RunFile) for problem in problems]
        problems = _problems(values, RECORDED)
        if not problems:
            return RunFile.model_validate(values, context=RECORDED), [_error(text) for text in dict.fromkeys(mistakes)]
        for problem in reversed(problems):  # the last first, so that the numbers of a list's items stay right
            _remove(values, problem)
    return None, [_error(text) for text in dict.fromkeys(mistakes)]


def _problems(values: dict[str, Any], context: Any = None) -> list[Any]:
    try:
        RunFile.model_validate(values, context=context)
    except ValidationError as error:
        return list(error.errors())
    return []


def _error(message: str) -> Result:
    return Result("error", "run file", message, "correct it: docs/run-file.md has all keys")


def _remove(values: Any, problem: Any) -> None:
    """Take out the wrong value. The last parts of a place may be names of types; what is missing cannot be removed."""
    holder, key = None, None
    for part in problem["loc"] if problem["type"] != "missing" else ():
        try:
            holder, key, values = values, part, values[part]
        except (KeyError, IndexError, TypeError):
            break
    if holder is not None:
        del holder[key]


PLAIN_TRAINING = {
    "scheduler": "constant",
    "scheduler_args": {},
    "track": [],
    "precision": "bf16",
    "frozen": UNQUANTISED,
}
"""Settings of `train` that are checked one by one, set to what always works."""


def check_settings(run: RunFile) -> list[Result]:
    """Errors and warnings about settings that the schema allows."""
    problems = []
    try:
        if note := launch_note():
            problems.append(Result("warning", "environment", note))
    except LookonceError as error:
        problems.append(Result("error", "environment", str(error)))
    problems += [*_packages(run), *_training(run)]
    if run.train.precision == "fp16" and gpu_gb() is None:
        lacking = "train.precision: fp16 needs a GPU, and this machine has none"
        problems.append(Result("warning", "training", lacking, "use bf16"))
    options = run.train
    usual = f"{options.optimizer}, {options.scheduler}, {run.batch.samples_per_step} samples a step"
    results = problems or [Result("ok", "training", usual)]
    split = run.eval.split
    if not getattr(run.data, split):
        nothing = f"eval.split is {split}, and data.{split} names no records: nothing is evaluated"
        results.append(Result("warning", "evaluation", nothing, f"set data.{split}, or eval.split"))
    return results


@contextlib.contextmanager
def _as_one_process() -> Iterator[None]:
    """Libraries do not join a process group within the block: a check would wait for the other processes."""
    hidden = {name: os.environ.pop(name) for name in (*LAUNCH, *MPI) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _packages(run: RunFile) -> Iterator[Result]:
    needed = {}
    if run.model.attention == "flash_attention_2":
        needed["flash_attn"] = "model.attention: flash_attention_2"
    if run.cache.backend == "torchvision":
        needed["torchvision"] = "cache.backend: torchvision"
    for package, setting in needed.items():
        if importlib.util.find_spec(package) is None:
            yield Result("error", "packages", f"{setting} needs the package {package}", "install it, or change the key")


def _training(run: RunFile) -> Iterator[Result]:
    import torch
    from transformers import Trainer

    from lookonce.eval.scores.metric import check_metric
    from lookonce.eval.scores.reward import Reward
    from lookonce.train.loop.arguments import check_scheduler, training_arguments
    from lookonce.train.loop.log_files import check_trackers
    from lookonce.train.model.frozen import check_frozen

    model: Any = torch.nn.Module()
    plain = run.model_copy(update={"train": run.train.model_copy(update=PLAIN_TRAINING)})
    checks: tuple[Callable[[], Any], ...] = (
        lambda: check_metric(run.eval.metric),
        lambda: run.train.objective == "grpo" and Reward(run.grpo),
        lambda: check_scheduler(run.train),
        lambda: check_trackers(run.train.track),
        lambda: check_frozen(run.train.frozen, "train.frozen"),
        lambda: Trainer.get_optimizer_cls_and_kwargs(training_arguments(plain, run.output), model),
    )
    for must_pass in checks:
        try:
            with _as_one_process():
                must_pass()
        except LookonceError as error:
            yield Result("error", "training", str(error), "correct the key, or install what it needs")
        except (ImportError, ValueError) as error:  # by transformers, of an optimizer whose package is missing
            problem = f"train.optimizer: {run.train.optimizer}: {first_line(error)}"
            yield Result("error", "packages", problem, "install it, or change the key")


PAGE = "docs/training.md#memory"
LONGEST = "the longest pack (images with their questions)"
USUAL_TOKENS = 2048
"""Shorter packs hold a few images, and their steps are slow."""


def check_memory(run: RunFile, model: CheckedModel, gpu_gb: float | None) -> list[Result]:
    """Whether the longest pack fits the memory of a GPU; `gpu_gb` is None if none is known."""
    config = model.model_folder.config if model.model_folder else None
    name, checkpointing = measured_name(run.model.path, config), run.train.gradient_checkpointing
    frozen = run.train.frozen
    if name is None or not run.batch.has_packs:
        unmeasured = "this model" if name is None else f"batch.mode: {run.batch.mode}"
        return [Result("ok", "GPU memory", f"not measured for {unmeasured}; training tries {LONGEST} first")]
    tokens, options = run.batch.tokens_per_pack, run.grpo
    needed = peak_gb(name, tokens, checkpointing, frozen)
    basis = "" if BYTES[frozen] == BYTES[UNQUANTISED] else f", computed for {frozen} weights and not measured"
    if draws := run.train.objective == "grpo":
        targets = min(tokens, run.batch.samples_per_step * options.samples * options.max_new_tokens)
        needed += (logits := logits_gb(targets))
        basis += f"; at most {logits:.0f} GB of it are logits of drawn answers; drawing uses what is left"
    need = f"{name}, packs of {tokens:,} tokens: about {needed:.0f} GB"
    if gpu_gb is None:
        return [
            Result(
                "ok", "GPU memory", f"{need}{basis}; this machine has no GPU; --gpu-memory GB checks for another one"
            )
        ]
    comparison = f"{need} of {gpu_gb:.0f} GB{basis}"
    if needed <= usable_gb(gpu_gb):
        return [Result("ok", "GPU memory", comparison)]
    advice = f"lower batch.tokens_per_pack, grpo.samples or grpo.max_new_tokens ({PAGE})"
    level: Level = "error" if needed > gpu_gb and not draws else "warning"
    return [Result(level, "GPU memory", comparison, advice if draws else _advice(name, gpu_gb, run))]


def _advice(name: str, gpu_gb: float, run: RunFile) -> str:
    """The keys to change: the fastest steps with packs of a usual length, or the longest packs."""
    frozen, checkpointing = run.train.frozen, run.train.gradient_checkpointing
    fitting = fits(name, gpu_gb, checkpointing, frozen)
    usual = [fit for fit in fitting if fit.num_tokens >= USUAL_TOKENS] or fitting
    if not usual:
        return f"a smaller model, a larger GPU or train.fsdp on several ({PAGE})"
    changes = []
    for fit in usual[:2]:
        is_shorter = fit.num_tokens < run.batch.tokens_per_pack
        keys = (f"batch.tokens_per_pack={fit.num_tokens}" if is_shorter else "", fit.text(frozen, checkpointing))
        changes.append(" with ".join(filter(None, keys)))
    return f"{' or '.join(changes)} ({PAGE})"


STATE_BYTES, ADAPTER_BYTES = 3 * 4, 4
"""Bytes for each trained weight: of a checkpoint the weight and Adam's two moments, in float32; of the adapter."""


def check_disk(run: RunFile, model: CheckedModel, images: CheckedImages, is_complete: bool) -> list[Result]:
    """Whether what the run will write fits; two folders on one disk count together."""
    needs: dict[int, list[tuple[str, Path, int]]] = defaultdict(list)
    for content, folder, num_bytes in _needs(run, model, images):
        needs[os.stat(existing(folder)).st_dev].append((content, folder, num_bytes))
    return [_compare(disk_needs, is_complete) for disk_needs in needs.values()]


def _needs(run: RunFile, model: CheckedModel, images: CheckedImages) -> Iterator[tuple[str, Path, int]]:
    if model.model_folder and images.to_encode:
        shape = model.model_folder.family.feature_shape(model.model_folder.vision_config)
        each = STORAGE[run.cache.dtype].bytes_per_token(*shape)
        yield "features", run.cache.dir, each * sum(images.tokens.get(path, 0) for path in images.to_encode)
    if model.num_trained:
        number = NUM_CHECKPOINTS + 1  # an old one is deleted once the new one is written
        yield "checkpoints", run.output, model.num_trained * (number * STATE_BYTES + ADAPTER_BYTES)


def _compare(needs: list[tuple[str, Path, int]], is_complete: bool) -> Result:
    free, total = free_bytes(needs[0][1]), sum(num_bytes for _, _, num_bytes in needs)
    parts = ", ".join(f"{size(num_bytes)} {content} in {folder}" for content, folder, num_bytes in needs)
    least = "" if is_complete else "at least "
    if free >= with_margin(total):
        return Result("ok", "disk", f"{least}{parts}; {size(free)} free")
    missing = f"{least}{parts}; only {size(free)} free, {size(with_margin(total) - free)} missing"
    return Result("error", "disk", missing, "make room, choose another `cache.dir`, or halve it: cache.dtype=fp8_e4m3")


def check_start(run: RunFile) -> Iterator[Result]:
    """Whether `train.start_from` can be followed; a training that has begun needs it only as its reference."""
    is_reference = run.train.objective == "grpo" and run.grpo.kl
    if run.train.start_from is None or (RunFolder(run.output).holds_work and not is_reference):
        return
    try:
        start = find_start(run)
    except LookonceError as error:
        yield Result("error", "start", str(error), "train that run, or correct `train.start_from`")
        return
    if start:
        yield Result("ok", "start", f"from the adapter of {start.folder}")


def check_output(run: RunFile, images: CheckedImages) -> Iterator[Result]:
    """The run folder, and the folder of caches if features are to be written."""
    folders = {"output": run.output} | ({"cache.dir": run.cache.dir} if images.to_encode else {})
    for key, path in folders.items():
        nearest = existing(path)
        if not nearest.is_dir():
            yield Result("error", "output", f"`{key}`: {nearest} is a file", f"choose another `{key}`")
        elif not os.access(nearest, os.W_OK | os.X_OK):
            problem = f"`{key}`: {nearest} is not writable"
            yield Result("error", "output", problem, f"chmod u+w, or another `{key}`")
    folder = RunFolder(run.output)
    if is_living(run.output / CLAIM, run.cache.claim_s):
        used_by = holder(run.output / CLAIM, run.cache.claim_s)
        yield Result("error", "output", f"{run.output} is in use by {used_by}", "wait until it has ended, or stop it")
        return
    try:
        identity = {"cache": images.fingerprint.sha256} if images.fingerprint else {}
        folder.check(run, identity | start_identity(run, folder.recorded_inputs()))
    except RunFolderError as error:
        restart = ", or lookonce train RUN.yaml --restart" if folder.holds_work else ""
        yield Result("error", "output", str(error), f"another `output`{restart}")
        return
    where = str(run.output)
    if folder.is_finished:
        yield Result("warning", "output", f"{where} holds this run, finished", "--restart trains it again")
    elif folder.was_trained_elsewhere:
        value = f"{where} holds an adapter that another program trained"
        yield Result("warning", "output", value, f"{shell('lookonce', 'eval', where)}, or another `output`")
    elif folder.trained.exists() or folder.last_checkpoint:
        yield Result("warning", "output", f"{where} holds this run, unfinished", "lookonce train RUN.yaml --resume")
    else:
        yield Result("ok", "output", where)


FIRST_RECORDS = 1000
"""How many records of each file are read, unless all are asked for."""


def check(
    path: Path,
    assignments: Sequence[str] = (),
    max_records: int | None = FIRST_RECORDS,
    gpu_memory_gb: float | None = None,
) -> CheckReport:
    """Check the run file at `path`; reads at most `max_records` records of each file, or all of them for None.

    `gpu_memory_gb` is the memory of the GPU that will train; by default that of this machine.
    """
    began = time.perf_counter()
    run, results = check_run_file(path, assignments)
    if run is None:
        return CheckReport(path, 0, False, time.perf_counter() - began, results)
    from lookonce.checks.inputs import (
        check_context,
        check_drawing,
        check_images,
        check_model,
        check_questions,
        check_records,
        check_tokens,
        count_records,
    )

    records, of_records = check_records(run, max_records)
    model, of_model = check_model(run)
    images, of_images = check_images(run, records, model)
    results += [*check_settings(run), *count_records(records, images.keys), *of_records, *of_model, *of_images]
    results += check_context(run, records, images.keys)
    results += check_questions(run, records)
    results += check_tokens(run, records, model, images)
    results += check_drawing(run, path, assignments, records, model)
    results += check_disk(run, model, images, records.is_complete)
    results += check_memory(run, model, gpu_memory_gb or gpu_gb())
    results += [*check_start(run), *check_output(run, images)]
    return CheckReport(path, records.num_records, records.is_complete, time.perf_counter() - began, results)
