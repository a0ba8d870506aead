"""`lookonce status`: how far a run is, from the plan to the evaluation. The work is done in `status`."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from lookonce.text import table

if TYPE_CHECKING:
    from lookonce.run.config import RunFile


@click.command()
@click.argument("paths", metavar="RUN...", type=PATH, nargs=-1, required=True)
@SET
@click.option("--missing", is_flag=True, help="Print only the phases with work left, one per line.")
@click.option("--watch", "interval_s", type=SECONDS, metavar="SECONDS", help="Repeat until all is done.")
@JSON
def status(
    paths: tuple[Path, ...], assignments: tuple[str, ...], missing: bool, interval_s: float | None, as_json: bool
) -> None:
    """Show how far a run is: plan, cache, training, evaluation.

    RUN is a run file or a run folder. Workers are listed with their Slurm job. A slow worker has had its shard three
    times as long as others took; a dead one had no heartbeat for `cache.claim_s` seconds. The last line is the command
    to run next. Several runs are shown as a table. --watch redraws on a terminal, and prints one line each time in a
    log.

    --missing prints, in this order: `plan` if no plan covers the run's images, `cache N` with the number of planned
    shards that are not finished (just `cache` without such a plan), `train`, `eval`. Nothing is missing from a finished
    run, even if its cache is gone. Problems that no phase can solve are printed on stderr.

    \b
    Keys of --json, an object for one run and a list of them for several:
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
      lookonce status a.yaml b.yaml --json
    """
    if missing and interval_s is not None:
        raise click.UsageError("--missing prints once and cannot be combined with --watch")
    runs = [_read(path, assignments) for path in paths]
    from lookonce.status import RunStatus

    statuses = [(path, RunStatus.open(run)) for path, run in runs]
    while True:
        states = [(path, status.opened.run, status.read()) for path, status in statuses]
        if missing:
            _show_missing(states, as_json)
        else:
            _show(states, assignments, as_json, is_watched=interval_s is not None)
        if interval_s is None or not any(state.missing() for _, _, state in states):
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


def _show_missing(states: list[Any], as_json: bool) -> None:
    for _, _, state in states:
        for note in state.notes:
            notify(note)
    found = [{"run_file": str(path), "missing": state.missing()} for path, _, state in states]
    lines = [phase for item in found for phase in item["missing"]]
    if lines or as_json:
        emit(found[0] if len(found) == 1 else found, "\n".join(lines), as_json)


def _show(states: list[Any], assignments: tuple[str, ...], as_json: bool, *, is_watched: bool) -> None:
    from lookonce.status import next_command

    commands = [next_command(run, state, path, assignments) for path, run, state in states]
    if as_json:
        values = [
            {"run_file": str(path), **asdict(state), "missing": state.missing(), "next_command": command}
            for (path, _, state), command in zip(states, commands, strict=True)
        ]
        value = values[0] if len(values) == 1 else values
        return emit(value, "", as_json=True, indent=None if is_watched else 2)
    if is_watched and not sys.stdout.isatty():
        for path, _, state in states:
            say(f"{path}: {state.line()}" if len(states) > 1 else state.line())
        return None
    if is_watched:
        click.clear()
    if len(states) > 1:
        from lookonce.status import HEADER

        return say(table(HEADER, [state.row() for _, _, state in states]))
    _, _, state = states[0]
    return say(f"{with_run_file(state.text())}\n\nnext: {commands[0]}")
