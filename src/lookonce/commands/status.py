"""`lookonce status`: how far a run is, from the plan to the evaluation. What it does is in `train.pipeline`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lookonce.commands.options import JSON, PATH, SET, emit, notify, read_run
from lookonce.text import table


@click.command()
@click.argument("run_files", metavar="RUN.yaml...", type=PATH, nargs=-1, required=True)
@SET
@click.option("--missing", is_flag=True, help="Only the stages that still have work, one a line; nothing if none has.")
@click.option("--watch", "interval_s", type=click.FloatRange(0.1), metavar="SECONDS", help="Again until all is done.")
@JSON
def status(
    run_files: tuple[Path, ...], assignments: tuple[str, ...], missing: bool, interval_s: float | None, as_json: bool
) -> None:
    """Show how far a run is: plan, cache, training, evaluation.

    Workers are shown with their Slurm job; a slow one has had its shard three times as long as others took, a dead one
    was not heard of for `cache.claim_s` seconds. The last line is the command to run next. Several run files are a
    table. --watch draws anew on a terminal, and prints one line in a log.

    --missing prints, in this order: `plan` if there is none that covers the run's images, `cache N` with the number of
    planned shards that are not finished (`cache` alone while there is no such plan), `train`, `eval`. A finished run
    lacks nothing, even if its cache is gone. What no stage can mend is told on stderr.

    \b
    Keys of --json, an object for one run file and a list of them for several:
      run_file, output, missing, notes, logs, next_command, split
      cache       is_planned, num_files, num_shards, num_pending, lost, and report: num_images, num_done,
                  num_quarantined, num_bytes, images_per_second, eta_s, workers (worker, host, job, shard, phase,
                  num_done, num_images, age_s, silent_s, alive, slow)
      training    state (not begun, running, dead, stopped, failed, trained, finished, another run), phase, step,
                  num_steps, loss, validation_loss, ms_per_sample, eta_s, silent_s, stepped_s, job, host, checkpoint,
                  reason
      scores      by split: num_questions, exact_match, majority

    \b
    Examples:
      lookonce status experiments/sample.yaml
      lookonce status run.yaml --watch 10
      lookonce status run.yaml --missing
      lookonce status a.yaml b.yaml --json
    """
    if missing and interval_s is not None:
        raise click.UsageError("--missing is said once; leave out --watch")
    runs = [(path, read_run(path, assignments)) for path in run_files]
    from lookonce.status.status import Pipeline

    pipelines = [(path, Pipeline.open(run)) for path, run in runs]
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            states = [(path, pipeline.run, pipeline.look()) for path, pipeline in pipelines]
            if missing:
                _show_missing(states, as_json)
            else:
                _show(states, assignments, as_json, is_watched=interval_s is not None)
            if interval_s is None or not any(state.missing() for _, _, state in states):
                return
            time.sleep(interval_s)


def _show_missing(states: list[Any], as_json: bool) -> None:
    for _, _, state in states:
        for note in state.notes:
            notify(note)
    found = [{"run_file": str(path), "missing": state.missing()} for path, _, state in states]
    lines = [stage for item in found for stage in item["missing"]]
    if lines or as_json:
        emit(found[0] if len(found) == 1 else found, "\n".join(lines), as_json)


def _show(states: list[Any], assignments: tuple[str, ...], as_json: bool, *, is_watched: bool) -> None:
    from lookonce.status.status import next_command

    commands = [next_command(run, state, path, assignments) for path, run, state in states]
    if as_json:
        values = [
            {"run_file": str(path), **asdict(state), "missing": state.missing(), "next_command": command}
            for (path, _, state), command in zip(states, commands, strict=True)
        ]
        value = values[0] if len(values) == 1 else values
        return click.echo(json.dumps(value, indent=None if is_watched else 2, ensure_ascii=False, default=str))
    if is_watched and not sys.stdout.isatty():
        for path, _, state in states:
            click.echo(f"{path}: {state.line()}" if len(states) > 1 else state.line())
        return None
    if is_watched:
        click.clear()
    if len(states) > 1:
        from lookonce.status.report import HEADER

        return click.echo(table(HEADER, [state.row() for _, _, state in states]))
    return click.echo(f"{states[0][2].text()}\n\nnext: {commands[0]}")
