"""Training: `lookonce train`, `status`, `selftest` and `bench`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce import environment
from lookonce.commands.options import (
    IMAGES,
    JSON,
    PATH,
    RUN,
    SET,
    VERIFY_IMAGES,
    check_launch,
    emit,
    nothing_to_set,
    notify,
    only_results_on_stdout,
    read_existing,
    read_run,
    remember_run_file,
)
from lookonce.environment import rank
from lookonce.errors import UsageError
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.run.startup import Startup, process_age
from lookonce.settings import MAX_COUNT
from lookonce.text import quiet

if TYPE_CHECKING:
    from lookonce.run.config import RunFile

LIBRARIES = "load libraries"


@click.command()
@RUN
@SET
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint, if there is one.")
@click.option("--restart", is_flag=True, help="Move the run in the output folder away and train again.")
@VERIFY_IMAGES
@JSON
def train(
    run_file: Path, assignments: tuple[str, ...], resume: bool, restart: bool, verify_images: bool, as_json: bool
) -> None:
    """Phase 2: train the adapter from the cache.

    Then answers the questions of the evaluation split, writes report.html and prints a summary. Needs no image files:
    the cache has their features, and its plan has their keys.

    On SIGUSR1 or SIGTERM, finishes the current step, saves a checkpoint and exits with code 75. Rerun with --resume to
    continue.

    \b
    Examples:
      lookonce train data/sample/run.yaml
      lookonce train data/sample/run.yaml --set train.epochs=5 --set output=runs/longer
      lookonce train run.yaml --resume
      torchrun --nproc-per-node 2 -m lookonce train run.yaml
    """
    if resume and restart:
        raise click.UsageError("--resume continues and --restart starts again; use one of them")
    check_launch()
    with only_results_on_stdout():
        run = read_existing(run_file, assignments)
        startup = Startup(notify if rank() == 0 else quiet, age_s=(age_s := process_age()))
        startup.seconds[LIBRARIES] = round(age_s, 3)  # a process begins with Python and its first libraries
        with startup.timed(LIBRARIES), environment.fewer_imports():
            from lookonce.train.model.compile import load_compiler
            from lookonce.workflow import train as train_run

            if run.train.compile:
                load_compiler()
        if note := environment.bytecode_note():
            startup.notify(note)
        summary = train_run(
            run, resume=resume, restart=restart, verify_images=verify_images, notify=notify, startup=startup
        )
    if summary:
        emit(summary.to_json(), summary.text(), as_json)


@click.command()
@click.argument("path", metavar="RUN", type=PATH)
@SET
@click.option("--missing", is_flag=True, help="Print only the phases with work left, one per line.")
@JSON
def status(path: Path, assignments: tuple[str, ...], missing: bool, as_json: bool) -> None:
    """Show how far a run is: plan, cache, training, evaluation.

    RUN is a run file or a run folder. Workers are listed with their Slurm job. A shard is one file of a cache; the plan
    lists the images of each. A worker is slow if it has taken three times as long for its shard as others took, and
    dead if it gave no heartbeat for `cache.claim_s` seconds. The last line is the command to run next. `watch -n 10
    lookonce status RUN` repeats it.

    --missing prints, in this order: `plan` if no plan covers the run's images, `cache N` with the number of planned
    shards that are not finished (just `cache` without such a plan), `train`, `eval`. Nothing is missing from a finished
    run, even if its cache is gone. Problems that no phase can solve are printed on stderr.

    \b
    Keys of --json:
      run_file, output, missing, notes, logs, next_command, split
      cache       is_planned, num_files, num_shards, num_pending, lost, and report: num_images, num_done,
                  num_quarantined, num_bytes, images_per_second, eta_s, workers (worker, host, job, shard, phase,
                  num_done, num_images, age_s, silent_s, alive, slow)
      training    state (not begun, running, dead, stopped, failed, trained, finished, another run), phase, step,
                  num_steps, loss, validation_loss, exact_match, score, reward, mixed_share (both of the answers that
                  train.objective: grpo drew last), ms_per_sample, eta_s, silent_s, stepped_s, job, host, checkpoint,
                  reason, startup_seconds
      scores      by split: metric, num_questions, score, interval, majority
      unfinished  evaluations without a result: questions answered so far, and of how many

    \b
    Examples:
      lookonce status data/sample/run.yaml
      lookonce status runs/sample
      lookonce status run.yaml --missing
      lookonce status run.yaml --json
    """
    path, run, assignments = _read(path, assignments)
    from lookonce.status import find_state, next_command

    state = find_state(run)
    if missing:
        for note in state.notes:
            notify(note)
        if as_json or state.missing():
            emit({"run_file": str(path), "missing": state.missing()}, "\n".join(state.missing()), as_json)
        return
    command = next_command(run, state, path, assignments)
    value = {"run_file": str(path), **asdict(state), "missing": state.missing(), "next_command": command}
    emit(value, f"{state.text()}\n\nnext: {command}", as_json)


def _read(path: Path, assignments: tuple[str, ...]) -> tuple[Path, RunFile, tuple[str, ...]]:
    """The run at a path: its run file, what it says, and assignments; of a run folder it is the copy in it."""
    if not path.is_dir():
        return path, read_run(path, assignments), assignments
    if assignments:
        raise nothing_to_set(path)
    from lookonce.run.folder import RunFolder

    run, copy = RunFolder(path).read_run(), path / "run.yaml"
    remember_run_file(copy)
    is_moved = run.output.absolute() != path.absolute()
    return copy, run.model_copy(update={"output": path.absolute()}), (f"output={path}",) if is_moved else ()


@click.command()
@JSON
@click.pass_context
def selftest(context: click.Context, as_json: bool) -> None:
    """Test that packs are exact on this machine.

    A pack is a training sequence of images with their questions. Compares packs with the rows of stock training, on
    this GPU with these libraries: masks, attention forward and backward, and loss and gradients of a small model, in
    float32 and in bfloat16, compiled or not, launched or replayed as CUDA graphs, with FlexAttention and with dense
    masks. Each difference may be a few times the spread, which is the difference between exact computations of rows,
    measured in the same run. Takes a minute or two on a GPU. Without one, small packs are compared with dense masks.

    Exits with 1 if anything differs by more, and prints the fastest settings that are exact. Each training on a GPU
    checks its own first pack; LOOKONCE_SELFTEST=off in the environment skips that.

    \b
    Keys of --json: ok, combination (the GPU, driver and versions), checks (what, difference, allowed, ok, error),
    exact (lists of settings, the fastest first), fastest (options of `lookonce train`), seconds.

    \b
    Examples:
      lookonce selftest
      lookonce selftest --json
    """
    from lookonce.selftest.model import run_selftest

    report = run_selftest(notify=notify)
    emit(report.to_json(), report.text(), as_json)
    context.exit(0 if report.ok else 1)


@click.group()
def bench() -> None:
    """Measure speed, side by side with stock transformers.

    \b
    Examples:
      lookonce bench step data/sample/run.yaml --steps 20
    """


@bench.command("step")
@click.argument("run_file", metavar="[RUN.yaml]", type=PATH, required=False)
@SET
@click.option(
    "--model",
    type=click.Choice([*dict.fromkeys(size for family in FAMILIES.values() for size in family.sizes)]),
    help="Instead of a run file: synthetic images and questions, and a model of this size with random weights.",
)
@click.option("--family", default=DEFAULT.model_type, type=click.Choice([*FAMILIES]), help="With --model: its family.")
@click.option(
    "--images",
    "num_images",
    default=64,
    show_default=True,
    type=click.IntRange(8, IMAGES),
    help="With --model: number of images; multiples of 64 have as many questions per image as Kvasir-VQA.",
)
@click.option("--tokenizer", type=PATH, help="With --model: folder of a tokenizer; by default the sample's.")
@click.option("--place", type=PATH, default=Path("bench"), show_default=True, help="With --model: folder of its files.")
@click.option(
    "--variants",
    default="plain,cached,shared",
    show_default=True,
    help="Comma-separated training variants; the first is the baseline.",
)
@click.option(
    "--steps",
    default=0,
    type=click.IntRange(0, MAX_COUNT),
    help="Optimizer steps to measure per variant; by default one epoch or more.",
)
@JSON
def bench_step(
    run_file: Path | None,
    assignments: tuple[str, ...],
    model: str | None,
    family: str,
    num_images: int,
    tokenizer: Path | None,
    place: Path,
    variants: str,
    steps: int,
    as_json: bool,
) -> None:
    """Measure training variants side by side: time, memory and losses.

    \b
    Variants:
      plain   stock Trainer: padded rows, tower in every step
      liger   the same with Liger's kernels
      cached  padded rows, features from the cache
      tower   packs, each question with its own image, tower in every step
      packed  packs, each question with its own image, from the cache
      shared  packs, questions share their image, from the cache (the default of `lookonce train`)
      fp8     `shared` with train.frozen: fp8

    A pack is a training sequence of images with their questions. --model writes a model of 4 to 18 GB and a run
    file to --place, and keeps them for the next time. If interrupted, or stopped by a signal (exit code 75), it still
    reports the finished variants.

    \b
    Examples:
      lookonce bench step data/sample/run.yaml
      lookonce bench step run.yaml --variants plain,liger,shared --steps 50 --json
      lookonce bench step --model 8b --variants plain,liger,cached,tower,packed,shared
      lookonce bench step run.yaml --variants shared --set train.gradient_checkpointing=selective
      torchrun --nproc-per-node 4 -m lookonce bench step bench/8b-64/run.yaml --variants shared
    """
    check_launch()
    if (run_file is None) == (model is None):
        raise click.UsageError("name either a run file or a --model for synthetic data")
    run = read_existing(run_file, assignments) if run_file else None  # before slow imports
    from lookonce.bench.step import bench_step as measure
    from lookonce.bench.step import data_folder, find_variants, make_run
    from lookonce.run.open import TO_BUILD, TO_MEASURE, open_run

    chosen = find_variants(variants.split(","))
    if run is None and model:
        if environment.num_ranks() > 1:
            raise UsageError(
                "--model writes files, which only one process can do; run it once without torchrun, and then "
                f"torchrun with the run file that it leaves in {data_folder(place, family, model, num_images)}"
            )
        run = make_run(place, model, num_images, tokenizer, assignments, family)
        open_run(run, TO_BUILD).build()
    assert run is not None
    if run.train.objective == "grpo":
        raise UsageError("bench step measures training on the answers of the records: --set train.objective=sft")
    opened = click.get_current_context().with_resource(open_run(run, TO_MEASURE))
    is_first = environment.rank() == 0
    notes = notify if is_first else lambda note: None
    report = None
    try:
        for so_far in measure(opened, opened.examples("train")[0], chosen, steps, notes):
            report = so_far
    finally:
        if report and is_first:
            emit(report.to_json(), report.text(), as_json)
