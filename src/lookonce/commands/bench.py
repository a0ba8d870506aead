"""`lookonce bench`: measurements, each side by side with the plain way and with what limits it, in one run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lookonce.commands.options import (
    JSON,
    PATH,
    PLACE,
    RUN,
    SET,
    cache_folder,
    emit,
    is_first,
    is_one_of_several,
    notify,
    open_inputs,
    read_run,
)
from lookonce.errors import UsageError
from lookonce.signals import stopping_early


@click.group()
def bench() -> None:
    """Measure side by side with the plain way, in one run."""


@bench.command("step")
@click.argument("run_file", metavar="[RUN.yaml]", type=PATH, required=False)
@SET
@click.option(
    "--model", type=click.Choice(["2b", "4b", "8b"]), help="Instead of a run file: real size, random weights."
)
@click.option(
    "--data",
    type=click.Choice(["kvasir-shaped"]),
    default="kvasir-shaped",
    help="With --model: made-up frames like it.",
)
@click.option(
    "--images",
    "num_images",
    default=64,
    show_default=True,
    type=click.IntRange(8),
    help="With --model: how many frames; multiples of 64 have as many questions each as Kvasir-VQA's.",
)
@click.option("--tokenizer", type=PATH, help="With --model: a folder whose tokenizer to use instead of the sample's.")
@click.option("--place", type=PATH, default=Path("bench"), show_default=True, help="With --model: where its files go.")
@click.option(
    "--ways", default="plain,cached,shared", show_default=True, help="Of training, the first to compare with."
)
@click.option(
    "--steps",
    default=0,
    type=click.IntRange(0),
    help="Optimizer steps to measure, each way; by default an epoch or more.",
)
@JSON
def bench_step(
    run_file: Path | None,
    assignments: tuple[str, ...],
    model: str | None,
    data: str,
    num_images: int,
    tokenizer: Path | None,
    place: Path,
    ways: str,
    steps: int,
    as_json: bool,
) -> None:
    """Train some steps in several ways: times, memory and losses side by side.

    Ways: plain (the stock Trainer with the tower), liger (with Liger's kernels), cached (rows, from the cache), tower
    and packed (no padding, every question its own image, with the tower and from the cache), shared (ours).
    --model writes a checkpoint of 4 to 18 GB and a run file to --place, and leaves them there for the next time.
    Interrupted, or stopped by SIGTERM or SIGUSR1 (exit code 75), it still shows the ways that have ended.

    \b
    Examples:
      lookonce bench step experiments/sample.yaml
      lookonce bench step run.yaml --ways plain,liger,shared --steps 50 --json
      lookonce bench step --model 8b --data kvasir-shaped --ways plain,liger,cached,tower,packed,shared
      torchrun --nproc-per-node 4 -m lookonce bench step bench/8b-64/run.yaml --ways shared
    """
    if (run_file is None) == (model is None):
        raise click.UsageError("name a run file, or a --model to make one up; one of them")
    from lookonce.bench.step_time import bench_step as measure
    from lookonce.bench.synthetic import make_run
    from lookonce.bench.variants import find_ways
    from lookonce.run.inputs import Inputs
    from lookonce.train.loop.session import Session

    chosen = find_ways(ways.split(","))
    if model and is_one_of_several():
        raise UsageError(
            "--model writes files, which one process must do; run it once without torchrun, and then "
            f"torchrun with the run file that it leaves in {place / f'{model}-{num_images}'}"
        )
    if model:
        inputs = Inputs.open(make_run(place, model, num_images, tokenizer, assignments))
        inputs.build()
    elif run_file:
        inputs = Inputs.open(read_run(run_file, assignments))
    session = Session.open(inputs)
    notes = notify if is_first() else lambda note: None
    report = None
    try:
        with stopping_early("the same command measures all ways again"):
            for of_ended in measure(session, session.examples("train")[0], chosen, steps, notes):
                report = of_ended
    finally:
        if report and is_first():
            emit(report.to_json(), report.text(), as_json)


@bench.command("cache")
@RUN
@SET
@click.option("--images", "num_images", default=0, type=click.IntRange(0), help="Of the run; by default all of them.")
@click.option("--plain", "num_plain", default=32, show_default=True, type=click.IntRange(1), help="For the plain loop.")
@click.option("--place", type=PATH, help="Where to write; by default beside the run's cache.")
@JSON
def bench_cache(
    run_file: Path, assignments: tuple[str, ...], num_images: int, num_plain: int, place: Path | None, as_json: bool
) -> None:
    """Make a cache and throw it away: how fast, beside the tower alone, the disk alone, and the plain loop.

    Writes the bytes of these images' cache five times over, and removes them.

    \b
    Examples:
      lookonce bench cache experiments/sample.yaml
      lookonce bench cache run.yaml --images 500 --place /scratch --json
    """
    inputs = open_inputs(run_file, assignments)
    from lookonce.bench.cache_build import bench_cache as measure

    report = measure(
        place or inputs.run.cache.dir,
        inputs.fingerprint,
        inputs.processor,
        inputs.images.first(num_images) if num_images else inputs.images,
        inputs.load_tower(),
        lambda: inputs.load_tower(fast=False).module,
        inputs.shard_bytes,
        num_plain,
    )
    emit(report.to_json(), report.text(), as_json)


@bench.command("read")
@PLACE
@SET
@click.option(
    "--images", "num_images", default=512, show_default=True, type=click.IntRange(1), help="To read at random."
)
@click.option("--no-check", is_flag=True, help="Without checksums.")
@JSON
def bench_read(place: Path, assignments: tuple[str, ...], num_images: int, no_check: bool, as_json: bool) -> None:
    """Read a cache at random, image by image, and in order, in large blocks.

    \b
    Examples:
      lookonce bench read experiments/sample.yaml
      lookonce bench read caches/1f2e3d4c5b6a7980 --images 2000 --json
    """
    folder = cache_folder(place, assignments)
    from lookonce.bench.cache_read import bench_read as measure

    report = measure(folder, num_images, check=not no_check)
    emit(asdict(report), report.text(), as_json)
