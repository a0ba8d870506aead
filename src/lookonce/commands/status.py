"""`lookonce status`: how far a run is, from the plan to the evaluation. The work is done in `status`."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.options import (
    JSON,
    PATH,
    SECONDS,
    SET,
    emit,
    nothing_to_set,
    notify,
    read_run,
    remember_run_file,
    say,
    with_run_file,
)

if TYPE_CHECKING:
    from lookonce.run.config import RunFile


@click.command()
@click.argument("path", metavar="RUN", type=PATH)
@SET
@click.option("--missing", is_flag=True, help="Print only the phases with work left, one per line.")
@click.option("--watch", "interval_s", type=SECONDS, metavar="SECONDS", help="Repeat until all is done.")
@JSON
def status(path: Path, assignments: tuple[str, ...], missing: bool, interval_s: float | None, as_json: bool) -> None:
    """Show how far a run is: plan, cache, training, evaluation.

    RUN is a run file or a run folder. Workers are listed with their Slurm job. A slow worker has had its shard three
    times as long as others took; a dead one had no heartbeat for `cache.claim_s` seconds. The last line is the command
    to run next. --watch redraws on a terminal, and prints one line each time in a log.

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
                  num_steps, loss, validation_loss, exact_match, ms_per_sample, eta_s, silent_s, stepped_s, job, host,
                  checkpoint, reason, startup_seconds
      scores      by split: num_questions, exact_match, majority
      unfinished  evaluations without a result: questions answered so far, and of how many

    \b
    Examples:
      lookonce status data/sample/run.yaml
      lookonce status runs/sample --watch 10
      lookonce status run.yaml --missing
      lookonce status run.yaml --json
    """
    if missing and interval_s is not None:
        raise click.UsageError("--missing prints once and cannot be combined with --watch")
    path, run = _read(path, assignments)
    from lookonce.status import RunStatus, next_command

    opened = RunStatus.open(run)
    while True:
        state = opened.read()
        if missing:
            for note in state.notes:
                notify(note)
            if as_json or state.missing():
                emit({"run_file": str(path), "missing": state.missing()}, "\n".join(state.missing()), as_json)
        elif as_json:
            command = next_command(run, state, path, assignments)
            value = {"run_file": str(path), **asdict(state), "missing": state.missing(), "next_command": command}
            emit(value, "", as_json, indent=2 if interval_s is None else None)
        elif interval_s is not None and not sys.stdout.isatty():
            say(state.line())
        else:
            if interval_s is not None:
                click.clear()
            say(f"{with_run_file(state.text())}\n\nnext: {next_command(run, state, path, assignments)}")
        if interval_s is None or not state.missing():
            return
        time.sleep(interval_s)


def _read(path: Path, assignments: tuple[str, ...]) -> tuple[Path, RunFile]:
    """The run at a path, and its run file; that of a run folder is the copy in it."""
    if not path.is_dir():
        return path, read_run(path, assignments)
    if assignments:
        raise nothing_to_set(path)
    from lookonce.run.folder import RunFolder

    run, copy = RunFolder(path).read_run(), path / "run.yaml"
    remember_run_file(copy)
    return copy, run.model_copy(update={"output": path.absolute()})  # it may have been moved
