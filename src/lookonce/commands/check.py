"""`lookonce check`: find what would stop a run, before it is run. The work is done in `checks`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from lookonce.commands.options import GIGABYTES, JSON, RUN, SET, emit, remember_run_file, with_run_file


@click.command()
@RUN
@SET
@click.option("--all", "is_all", is_flag=True, help="Read all records, not only the first thousand of each file.")
@click.option(
    "--gpu-memory",
    "gpu_gb",
    type=GIGABYTES,
    metavar="GB",
    help="Memory of the GPU that will train, in GB; by default that of this machine's.",
)
@JSON
def check(run_file: Path, assignments: tuple[str, ...], is_all: bool, gpu_gb: float | None, as_json: bool) -> None:
    """Say what would stop or surprise the run later.

    Needs no GPU, downloads nothing and writes nothing to the run. Looks at the keys of the run file, paths, records,
    model, tokenizer, token lengths, images and the cache, disk space, GPU memory, and the run folder. Every problem is
    listed, with its number and what to do about it, not only the first.

    Exits 1 if there is an error. Warnings are what will be different from what one might expect, such as records that
    are left out.

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
    emit(report.to_json(), with_run_file(report.text()), as_json)
    sys.exit(0 if report.is_ok else 1)
