"""`lookonce eval`: score an adapter. The work is done in `eval.run`."""

from __future__ import annotations

from pathlib import Path

import click

from lookonce.commands.options import JSON, PATH, VERIFY_IMAGES, emit, notify, only_results_on_stdout, remember_run_file
from lookonce.signals import exit_on_signal


@click.command("eval")
@click.argument("run_dir", metavar="RUN_DIR", type=PATH)
@click.option("--split", type=click.Choice(["train", "val", "test"]), help="By default `eval.split` of the run file.")
@click.option(
    "--shuffle-images",
    is_flag=True,
    help="Give each question another image: a model that uses the images must score lower.",
)
@VERIFY_IMAGES
@JSON
def evaluate(run_dir: Path, split: str | None, shuffle_images: bool, verify_images: bool, as_json: bool) -> None:
    """Score a split beside the majority baseline.

    Questions are answered greedily. An answer is right if it equals the reference, apart from spaces around it.

    Under torchrun the processes share the questions. An interrupted evaluation is continued by the same command.

    RUN_DIR is a run folder, or a run file. A folder stands for the run as it was trained, which its run.json records;
    its run.yaml is a copy for people. The paths and the section `eval` of a run file that is named count instead.

    Predictions are written to `predictions` in the run folder, scores to `metrics`.

    \b
    Examples:
      lookonce eval runs/sample
      lookonce eval runs/sample --split test --json
      lookonce eval runs/sample --shuffle-images
      lookonce eval runs/sample/run.yaml
      torchrun --nproc-per-node 4 -m lookonce eval runs/sample
    """
    with only_results_on_stdout():
        from lookonce.eval.run import evaluate_run

    if run_dir.is_file():
        remember_run_file(run_dir)
    with exit_on_signal():
        done = evaluate_run(run_dir, split, shuffled=shuffle_images, verify_images=verify_images, notify=notify)
    if done:  # on the first rank
        evaluation, path = done
        notify(f"predictions: {path}")
        emit(evaluation.to_json(), evaluation.text(), as_json)
