"""`lookonce route`: one predictions file from several runs. The work is done in `eval.comparison.route`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from lookonce.commands.options import JSON, PATH, SPLIT, emit, notify
from lookonce.eval.comparison.route import Label


@click.command()
@click.argument("runs", metavar="VALUE=RUN...", nargs=-1, required=True)
@click.option("--by", default="stage", show_default=True, type=click.Choice(get_args(Label)), help="What decides.")
@SPLIT
@click.option("-o", "--output", type=PATH, required=True, metavar="FILE", help="Predictions file to write (JSONL).")
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@JSON
def route(runs: tuple[str, ...], by: Label, split: str | None, output: Path, overwrite: bool, as_json: bool) -> None:
    """Route each question to the adapter of its stage: one predictions file from several runs.

    Each RUN, a run folder, a run file or a file of predictions, has answered all questions. Of each question the answer
    of the run of its VALUE is taken, as it is: no model is loaded. The file can be compared and reported like a run. In
    a study, an arm with `route` does this for every seed.

    \b
    Keys of --json: those of metrics/SPLIT.json.

    \b
    Examples:
      lookonce route 1=runs/stage-1 2=runs/stage-2 3=runs/stage-3 --split test -o routed.jsonl
      lookonce route polyps=runs/polyps "normal=runs/others" --by source -o routed.jsonl
    """
    from lookonce.errors import UsageError
    from lookonce.eval.comparison.route import route as routed
    from lookonce.eval.comparison.runs import read_runs
    from lookonce.eval.scores.metrics import Evaluation
    from lookonce.eval.scores.prediction import write_predictions
    from lookonce.run.claim import claimed_around

    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists; name another file, or replace it with --overwrite")
    values, paths = [one.partition("=")[0] for one in runs], [Path(one.partition("=")[2]) for one in runs]
    if wrong := [one for one in runs if not all(one.partition("="))]:
        raise UsageError(f"{wrong[0]}: name the run of each {by}, such as 1=runs/first")
    if twice := [value for value in values if values.count(value) > 1]:
        raise UsageError(f"there are two runs for {by} {twice[0]}; name one")
    with claimed_around(output, "lookonce route"):
        predictions = routed(dict(zip(values, read_runs(paths, split), strict=True)), by)
        evaluation = Evaluation.of(predictions)
        write_predictions(output, predictions)
    notify(f"wrote the predictions to {output}")
    emit(evaluation.to_json(), evaluation.text(), as_json)
