"""`lookonce eval`: score an adapter. The work is done in `eval.run`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, PATH, emit, notify, remember_run_file


@click.command("eval")
@click.argument("run_dir", metavar="RUN_DIR", type=PATH)
@click.option("--split", type=click.Choice(["train", "val", "test"]), help="By default `eval.split` of the run file.")
@click.option(
    "--shuffle-images",
    is_flag=True,
    help="Give each question another image: a model that uses the images must score lower.",
)
@JSON
def evaluate(run_dir: Path, split: str | None, shuffle_images: bool, as_json: bool) -> None:
    """Score a split beside the majority baseline.

    Questions are answered greedily. An answer is right if it equals the reference, apart from spaces around it.

    RUN_DIR is a run folder, or a run file. Predictions are written to RUN_DIR/predictions, scores to RUN_DIR/metrics.

    \b
    Examples:
      lookonce eval runs/sample
      lookonce eval runs/sample --split test --json
      lookonce eval runs/sample --shuffle-images
    """
    from lookonce.eval.run import evaluate_run

    if run_dir.is_file():
        remember_run_file(run_dir)
    evaluation, path = evaluate_run(run_dir, split, shuffled=shuffle_images)
    notify(f"predictions: {path}")
    emit(evaluation.to_json(), evaluation.text(), as_json)
