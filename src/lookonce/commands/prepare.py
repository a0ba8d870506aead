"""What precedes a run: `lookonce sample`, `init`, `check` and `fetch`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lookonce.commands.options import (
    GIGABYTES,
    IMAGES,
    JSON,
    PATH,
    RUN,
    SET,
    Decimal,
    emit,
    notify,
    read_run,
    remember_run_file,
)
from lookonce.errors import UsageError
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.text import shell

NEXT = """next:
  lookonce cache build {run}
  lookonce train {run}
  lookonce eval {output} --split test"""


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--family",
    default=DEFAULT.model_type,
    show_default=True,
    type=click.Choice([*FAMILIES]),
    help="Family of the model.",
)
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    type=click.Choice([*dict.fromkeys(size for family in FAMILIES.values() for size in family.sizes)]),
    help="Size of the model, of those in its family. Real sizes have random weights, for measuring speed.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True),
    help="Folder of a tokenizer for the model; by default the sample's own.",
)
@click.option(
    "--images", "num_images", type=click.IntRange(8, IMAGES), help="Number of images; by default 64, with --stages 128."
)
@click.option(
    "--sizes", type=click.Choice(["kvasir"]), help="Frames with Kvasir-VQA's image sizes, in the same proportions."
)
@click.option("--tower-only", is_flag=True, help="Leave out the language model: enough to build and measure caches.")
@click.option("--stages", is_flag=True, help="Ask in three stages: later answers follow from earlier ones.")
@JSON
def sample(folder: Path, as_json: bool, **options: Any) -> None:
    """Write a small sample dataset, a model to try everything on, and a run file for both, DIR/run.yaml.

    Paths in the run file are relative to the folder where this command runs. A model of a real size gets no run file:
    it serves to measure speed.

    \b
    Examples:
      lookonce sample data/sample
      lookonce sample data/stages --stages
      lookonce sample data/qwen2.5 --family qwen2_5_vl
      lookonce sample data/speed --model 2b
      lookonce sample data/cache-speed --model 8b --tower-only --images 1200 --sizes kvasir
    """
    from lookonce.datasets.sample.write import write_sample

    report = write_sample(folder, **options)
    emit(asdict(report), report.text(), as_json)
    if report.run_file:
        notify(NEXT.format(run=shell(report.run_file), output=shell(f"runs/{folder.absolute().name}")))


GPU_MEMORY = click.option(
    "--gpu-memory",
    "gpu_gb",
    type=GIGABYTES,
    metavar="GB",
    help="Memory of the GPU that will train, in GB; by default that of this machine's.",
)
MODEL, OUTPUT = "Qwen/Qwen3-VL-8B-Instruct", "runs/first"


@click.command()
@click.argument("run_file", metavar="RUN.yaml", type=PATH)
@click.option("--model", metavar="MODEL", help=f"A model folder, or a Hub name such as {MODEL}.")
@click.option("--train", multiple=True, metavar="RECORDS", help="Records file to train on; may be given several times.")
@click.option("--val", multiple=True, metavar="RECORDS", help="Records file for the validation loss.")
@click.option("--test", multiple=True, metavar="RECORDS", help="Records file for a final evaluation.")
@click.option("--image-root", metavar="DIR", help="Folder of the images; by default that of the records file.")
@GPU_MEMORY
@click.option("--output", metavar="DIR", help=f"The run folder; by default {OUTPUT}.")
@click.option("--yes", "is_yes", is_flag=True, help="Ask nothing: use the defaults for what is not given.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@JSON
def init(run_file: Path, gpu_gb: float | None, is_yes: bool, force: bool, as_json: bool, **options: Any) -> None:
    """Write a run file, with a comment that says why each value was proposed.

    Reads the records and the model's configuration, and looks at this machine. Proposes batch.tokens_per_pack and
    batch.samples_per_step, and keys that the model needs, such as data.enable_thinking. On a terminal, it asks for
    options that are missing.

    \b
    Examples:
      lookonce init run.yaml
      lookonce init run.yaml --model data/sample/model --train data/sample/train.jsonl --val data/sample/val.jsonl --yes
      lookonce init run.yaml --model Qwen/Qwen3-VL-8B-Instruct --train train.jsonl --gpu-memory 40 --force
    """
    from lookonce.proposal import NO_VAL, refuse_existing
    from lookonce.proposal import init as write_run_file

    refuse_existing(run_file, force)  # before anything is asked
    if not is_yes and is_terminal():
        gpu_gb = _ask(options, gpu_gb)
    missing = [f"--{name}" for name in ("model", "train") if not options[name]]
    if missing:
        raise UsageError(f"{' and '.join(missing)} must be given; on a terminal and without --yes, init asks for them")
    options["output"] = options["output"] or OUTPUT
    values = _by_key(options)
    written = write_run_file(run_file, values, gpu_gb, force=force)
    emit(written.to_json(), written.text(), as_json)
    if "data.val" not in values:
        notify(NO_VAL)


def is_terminal() -> bool:
    """Whether someone can answer questions."""
    return sys.stdin.isatty()


def _ask(options: dict[str, Any], gpu_gb: float | None) -> float | None:
    """Ask for what is not given; returns the memory of the GPU."""
    options["model"] = options["model"] or click.prompt("Model: a folder or a Hub name", default=MODEL, err=True)
    options["train"] = options["train"] or (click.prompt("Records to train on", err=True),)
    for split, use in (("val", "the validation loss"), ("test", "a final evaluation")):
        if not options[split]:
            answer = click.prompt(f"Records for {use} (empty: none)", default="", show_default=False, err=True)
            options[split] = (answer,) if answer else ()
    if gpu_gb is None:
        question = "Memory of the GPU that will train, in GB (0: that of this machine's)"
        gpu_gb = click.prompt(question, default=0.0, type=Decimal(0, 10_000), err=True) or None
    options["output"] = options["output"] or click.prompt("Run folder", default=OUTPUT, err=True)
    return gpu_gb


def _by_key(options: dict[str, Any]) -> dict[str, Any]:
    """The given values by their keys in the run file."""
    keys = {"model": "model.path"} | {name: f"data.{name}" for name in ("train", "val", "test", "image_root")}
    values = {key: options[name] for name, key in (keys | {"output": "output"}).items() if options[name]}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


@click.command()
@RUN
@SET
@click.option("--all", "is_all", is_flag=True, help="Read all records, not only the first thousand of each file.")
@GPU_MEMORY
@JSON
def check(run_file: Path, assignments: tuple[str, ...], is_all: bool, gpu_gb: float | None, as_json: bool) -> None:
    """List what would stop the run later, or surprise its user.

    Needs no GPU, downloads nothing and writes nothing to the run. Looks at the keys of the run file, paths, records,
    model, tokenizer, token lengths, images and the cache, disk space, GPU memory, and the run folder. Lists every
    problem, not only the first, with how often it occurs and how to fix it.

    Exits 1 if there is an error. A warning is something that may surprise, such as records that are left out.

    \b
    Examples:
      lookonce check data/sample/run.yaml
      lookonce check run.yaml --all --gpu-memory 24
      lookonce check run.yaml --set batch.tokens_per_pack=4096 --json
    """
    from lookonce.checks.check import FIRST_RECORDS
    from lookonce.checks.check import check as check_run

    remember_run_file(run_file, assignments)
    report = check_run(run_file, assignments, None if is_all else FIRST_RECORDS, gpu_gb)
    emit(report.to_json(), report.text(), as_json)
    sys.exit(0 if report.is_ok else 1)


@click.command()
@RUN
@SET
@click.option("--pin", "pins", is_flag=True, help="Write the commits of what was downloaded into RUN.yaml.")
@JSON
def fetch(run_file: Path, assignments: tuple[str, ...], pins: bool, as_json: bool) -> None:
    """Download everything that a run needs, for machines without internet.

    Downloads the model at `model.revision` (safetensors weights, configurations, tokenizer), compares its files with
    the hashes that the Hub states, opens it as jobs will, checks that records and images exist, and prints the
    environment variables for jobs. A model folder is only checked. An adapter on the Hub that `train.start_from` names
    is downloaded too. Both are stored in HF_HOME, which all nodes must share.

    Exits with 1 if something is missing that it cannot download.

    \b
    Examples:
      lookonce fetch data/sample/run.yaml
      lookonce fetch run.yaml --pin
      lookonce fetch run.yaml --set model.revision=main --json
    """
    run = read_run(run_file, assignments)
    from lookonce.fetch import fetch as fetch_run
    from lookonce.fetch import pin

    report = fetch_run(run)
    emit(asdict(report), report.text(), as_json)
    for section, key, value, is_pinned in (
        ("model", "revision", report.commit, report.is_pinned),
        ("train", "start_from", report.start, report.is_start_pinned),
    ):
        if value and pins:
            is_new = pin(run_file, section, key, value)
            notify(f"{run_file} {'now has' if is_new else 'already has'} {section}.{key}: {value}")
        elif not is_pinned:
            notify(
                f"{section}.{key} names no commit, so it may change; pin this one with --pin, or write in section "
                f'`{section}`: {key}: "{value}"'
            )
    sys.exit(1 if report.problems else 0)
