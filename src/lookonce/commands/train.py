"""`lookonce train`: train an adapter. The work is done in `workflow.train`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, RUN, SET, emit, notify, read_run
from lookonce.signals import exit_on_signal


@click.command()
@RUN
@SET
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint, if there is one.")
@click.option("--restart", is_flag=True, help="Move the run in the output folder away and train again.")
@JSON
def train(run_file: Path, assignments: tuple[str, ...], resume: bool, restart: bool, as_json: bool) -> None:
    """Phase 2: train the adapter from the cache.

    Then answers the questions of the evaluation split and prints a summary.

    On SIGUSR1 or SIGTERM, finishes the current step, saves a checkpoint and exits with code 75. Rerun with --resume to
    continue.

    \b
    Examples:
      lookonce train experiments/sample.yaml
      lookonce train experiments/sample.yaml --set train.epochs=5 --set output=runs/longer
      lookonce train run.yaml --resume
      torchrun --nproc-per-node 2 -m lookonce train run.yaml
    """
    if resume and restart:
        raise click.UsageError("--resume continues and --restart starts again; use one of them")
    with exit_on_signal("run the same command with --resume to continue"):
        run = read_run(run_file, assignments)
        from lookonce.workflow.train import train as train_run

        summary = train_run(run, resume=resume, restart=restart, notify=notify)
    if summary:
        emit(summary.to_json(), summary.text(), as_json)
