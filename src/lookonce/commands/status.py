"""`lookonce status`: how far a run is, from the plan to the evaluation. What it does is in `train.pipeline`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, RUN, SET, emit, read_run, say


@click.command()
@RUN
@SET
@click.option("--missing", is_flag=True, help="Only the stages that still have work, one a line; nothing if none has.")
@JSON
def status(run_file: Path, assignments: tuple[str, ...], missing: bool, as_json: bool) -> None:
    """Show how far a run is: plan, cache, training, evaluation.

    --missing prints, in this order: `plan` if there is none that covers the run's images, `cache N` with the number of
    planned shards that are not finished (`cache` alone while there is no such plan), `train`, `eval`. A finished run
    lacks nothing, even if its cache is gone. What no stage can mend is told on stderr.

    \b
    Examples:
      lookonce status experiments/sample.yaml
      lookonce status run.yaml --missing
    """
    run = read_run(run_file, assignments)
    from lookonce.train.pipeline import Pipeline

    state = Pipeline.open(run).look()
    for note in state.notes:
        say(note)
    found = state.missing()
    if found or as_json:
        emit({"missing": found, "notes": state.notes}, "\n".join(found), as_json)
