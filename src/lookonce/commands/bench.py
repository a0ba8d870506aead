"""`lookonce bench`: measurements, each beside stock transformers and beside what the hardware allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lookonce import environment
from lookonce.commands.options import (
    IMAGES,
    JSON,
    PATH,
    PLACE,
    RUN,
    SET,
    cache_folder,
    check_launch,
    emit,
    notify,
    read_existing,
)
from lookonce.errors import UsageError
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.settings import MAX_COUNT
from lookonce.text import listed

if TYPE_CHECKING:
    from lookonce.run.config import RunFile
    from lookonce.run.open import OpenRun


def synthetic(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that choose synthetic data and a model of real size instead of a run file."""
    options = (
        click.option(
            "--model",
            type=click.Choice([*dict.fromkeys(size for family in FAMILIES.values() for size in family.sizes)]),
            help="Instead of a run file: a model of this size, random weights.",
        ),
        click.option(
            "--family", default=DEFAULT.model_type, type=click.Choice([*FAMILIES]), help="With --model: its family."
        ),
        click.option(
            "--data",
            type=click.Choice(["kvasir-shaped"]),
            default="kvasir-shaped",
            expose_value=False,
            help="With --model: synthetic images and questions.",
        ),
        click.option(
            "--images",
            "num_images",
            default=64,
            show_default=True,
            type=click.IntRange(8, IMAGES),
            help="With --model: number of images; multiples of 64 have as many questions per image as Kvasir-VQA.",
        ),
        click.option("--tokenizer", type=PATH, help="With --model: folder of a tokenizer; by default the sample's."),
        click.option(
            "--place", type=PATH, default=Path("bench"), show_default=True, help="With --model: folder of its files."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def bench() -> None:
    """Measure speed, side by side with stock transformers.

    \b
    Examples:
      lookonce bench step data/sample/run.yaml --steps 20
      lookonce bench cache data/sample/run.yaml
    """


def _chosen_run(run_file: Path | None, assignments: tuple[str, ...], model: str | None) -> RunFile | None:
    """The run file of a measurement, which is read before slow imports; None for synthetic data."""
    check_launch()
    if (run_file is None) == (model is None):
        raise click.UsageError("name either a run file or a --model for synthetic data")
    return read_existing(run_file, assignments) if run_file else None


def _opened(
    run: RunFile | None,
    assignments: tuple[str, ...],
    model: str | None,
    family: str,
    num_images: int,
    tokenizer: Path | None,
    place: Path,
) -> OpenRun:
    """A run, or a synthetic one whose cache is built."""
    from lookonce.bench.synthetic import data_folder, make_run
    from lookonce.run.open import TO_BUILD, Needs, open_run

    if run is None and environment.num_ranks() > 1:
        assert model
        raise UsageError(
            "--model writes files, which only one process can do; run it once without torchrun, and then "
            f"torchrun with the run file that it leaves in {data_folder(place, family, model, num_images)}"
        )
    if run is None:
        assert model
        run = make_run(place, model, num_images, tokenizer, assignments, family)
        open_run(run, TO_BUILD).build()
    needs = Needs("lookonce bench", records="used", images="hashed", model="open", cache=True)
    return click.get_current_context().with_resource(open_run(run, needs))


@bench.command("step")
@click.argument("run_file", metavar="[RUN.yaml]", type=PATH, required=False)
@SET
@synthetic
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
      lookonce bench step --model 8b --data kvasir-shaped --variants plain,liger,cached,tower,packed,shared
      lookonce bench step run.yaml --variants shared --set train.gradient_checkpointing=selective
      torchrun --nproc-per-node 4 -m lookonce bench step bench/8b-64/run.yaml --variants shared
    """
    run = _chosen_run(run_file, assignments, model)
    from lookonce.bench.step import bench_step as measure
    from lookonce.bench.step import find_variants

    chosen = find_variants(variants.split(","))
    opened = _opened(run, assignments, model, family, num_images, tokenizer, place)
    is_first = environment.rank() == 0
    notes = notify if is_first else lambda note: None
    report = None
    try:
        for so_far in measure(opened, opened.examples("train")[0], chosen, steps, notes):
            report = so_far
    finally:
        if report and is_first:
            emit(report.to_json(), report.text(), as_json)


@bench.command("answers")
@click.argument("run_file", metavar="[RUN.yaml]", type=PATH, required=False)
@SET
@synthetic
@click.option("--split", default="train", show_default=True, help="Split whose questions are answered.")
@click.option(
    "--engines",
    default="generate,shared",
    show_default=True,
    help="Comma-separated values of eval.engine; the first is the baseline.",
)
@JSON
def bench_answers(
    run_file: Path | None,
    assignments: tuple[str, ...],
    model: str | None,
    family: str,
    num_images: int,
    tokenizer: Path | None,
    place: Path,
    split: str,
    engines: str,
    as_json: bool,
) -> None:
    """Measure how fast questions are answered, with shared prefixes and by transformers' generate.

    Each engine runs its whole path, from records and cached features to a file of answers. Beside them: the prompts
    alone, and reading the weights once for each token of a wave.

    \b
    Examples:
      lookonce bench answers run.yaml --split test
      lookonce bench answers --model 8b --images 48 --set eval.max_new_tokens=8
    """
    run = _chosen_run(run_file, assignments, model)
    if unknown := sorted(set(chosen := engines.split(",")) - {"generate", "shared"}):
        raise UsageError(f"--engines has no {listed(unknown)}; choose from generate, shared")
    from lookonce.bench.answers import bench_answers as measure

    opened = _opened(run, assignments, model, family, num_images, tokenizer, place)
    if not (records := opened.records.get(split)):
        raise UsageError(f"the run file names no records for `data.{split}`; choose another --split")
    report = None
    try:
        for so_far in measure(opened, records, chosen, notify):
            report = so_far
    finally:
        if report:
            emit(report.to_json(), report.text(), as_json)


@bench.command("cache")
@RUN
@SET
@click.option(
    "--images",
    "num_images",
    default=0,
    type=click.IntRange(0, IMAGES),
    help="Number of images; by default all of the run's.",
)
@click.option(
    "--plain",
    "num_plain",
    default=32,
    show_default=True,
    type=click.IntRange(1, IMAGES),
    help="Images for the stock loop.",
)
@click.option("--place", type=PATH, help="Folder for the files that are written; by default that of the run's caches.")
@JSON
def bench_cache(
    run_file: Path, assignments: tuple[str, ...], num_images: int, num_plain: int, place: Path | None, as_json: bool
) -> None:
    """Measure building a cache, beside its limits and a stock loop.

    The limits are the tower alone and the disk alone. The stock loop runs transformers' processor and tower over one
    image after another. Writes five times the size of these images' cache, and removes it.

    \b
    Examples:
      lookonce bench cache data/sample/run.yaml
      lookonce bench cache run.yaml --images 500 --place /scratch --json
    """
    run = read_existing(run_file, assignments)
    from lookonce.bench.cache import bench_cache as measure
    from lookonce.run.open import TO_BUILD, open_run

    opened = open_run(run, TO_BUILD)
    report = measure(
        place or run.cache.dir,
        opened.fingerprint,
        opened.processor,
        opened.images.first(num_images) if num_images else opened.images,
        opened.load_tower(),
        lambda: opened.load_tower(fast=False).module,
        opened.shard_bytes,
        num_plain,
    )
    emit(report.to_json(), report.text(), as_json)


@bench.command("read")
@PLACE
@SET
@click.option(
    "--images", "num_images", default=512, show_default=True, type=click.IntRange(1, IMAGES), help="Images to read."
)
@click.option("--no-check", is_flag=True, help="Do not compare checksums.")
@JSON
def bench_read(place: Path, assignments: tuple[str, ...], num_images: int, no_check: bool, as_json: bool) -> None:
    """Measure reading images in random order, beside reading the files in order.

    \b
    Examples:
      lookonce bench read data/sample/run.yaml
      lookonce bench read caches/1f2e3d4c5b6a7980 --images 2000 --json
    """
    folder = cache_folder(place, assignments)
    from lookonce.bench.cache import bench_read as measure

    report = measure(folder, num_images, check=not no_check)
    emit(asdict(report), report.text(), as_json)
