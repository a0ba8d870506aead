"""`lookonce train`: train an adapter. The work is done in `lookonce.workflow`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import (
    JSON,
    RUN,
    SET,
    VERIFY_IMAGES,
    check_launch,
    emit,
    notify,
    only_results_on_stdout,
    read_existing,
)
from lookonce.environment import rank
from lookonce.run.startup import Startup
from lookonce.text import quiet


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
        startup = Startup.of_process(notify if rank() == 0 else quiet)
        with startup.timed("load libraries"):
            from lookonce.workflow import train as train_run

        summary = train_run(
            run, resume=resume, restart=restart, verify_images=verify_images, notify=notify, startup=startup
        )
    if summary:
        emit(summary.to_json(), summary.text(), as_json)
