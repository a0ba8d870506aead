"""`lookonce bench`: measurements, each beside stock transformers and beside what the hardware allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce import environment
from lookonce.commands.options import (
    IMAGES,
    JSON,
    PATH,
    SET,
    check_launch,
    emit,
    notify,
    read_existing,
)
from lookonce.errors import UsageError
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.settings import MAX_COUNT

if TYPE_CHECKING:
    pass


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

    --model writes a model of 4 to 18 GB and a run file to --place, and keeps them for the next time. If interrupted, or
    stopped by a signal (exit code 75), it still reports the finished variants.

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
    from lookonce.bench.step import find_variants
    from lookonce.bench.synthetic import data_folder, make_run
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
