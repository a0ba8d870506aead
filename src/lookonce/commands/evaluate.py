"""`lookonce eval`: score an adapter, or a baseline. The work is done in `eval.run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.options import (
    JSON,
    PATH,
    SET,
    SPLIT,
    VERIFY_IMAGES,
    check_launch,
    emit,
    notify,
    only_results_on_stdout,
    remember_run_file,
)

if TYPE_CHECKING:
    from lookonce.eval.scores.metrics import Baseline


@click.command("eval")
@click.argument("run_dir", metavar="RUN_DIR", type=PATH)
@SPLIT
@click.option(
    "--shuffle-images",
    is_flag=True,
    help="Give each question another image: a model that uses the images must score lower.",
)
@click.option("--blank-images", is_flag=True, help="Replace each image by a grey one of the same size.")
@click.option("--untuned", is_flag=True, help="Answer without the adapter; with a run file also before it is trained.")
@click.option("--true-context", is_flag=True, help="With data.context, give true answers to earlier questions.")
@click.option("--no-context", is_flag=True, help="With data.context, give no answers to earlier questions.")
@click.option("--baselines", is_flag=True, help="Answer as all baselines, and compare the run.")
@SET
@VERIFY_IMAGES
@JSON
def evaluate(
    run_dir: Path,
    split: str | None,
    shuffle_images: bool,
    blank_images: bool,
    untuned: bool,
    true_context: bool,
    no_context: bool,
    baselines: bool,
    assignments: tuple[str, ...],
    verify_images: bool,
    as_json: bool,
) -> None:
    """Score a split beside the majority baseline, and beside the baselines that a model has answered.

    Questions are answered greedily. An answer is right if it equals the reference, apart from spaces around it.

    Under torchrun the processes share the questions. An interrupted evaluation is continued by the same command.

    RUN_DIR is a run folder, or a run file. A folder stands for the run as it was trained, which its run.json records;
    its run.yaml is a copy for people. The paths and the section `eval` of a run file that is named count instead, and
    --set replaces keys of either.

    Predictions are written to `predictions` in the run folder, scores to `metrics`; those of a baseline have names such
    as test-untuned. With several baselines the model is loaded once, answers that are on disk are not given again, and
    the run is compared with them.

    \b
    Examples:
      lookonce eval runs/sample
      lookonce eval runs/sample --split test --json
      lookonce eval runs/sample --baselines
      lookonce eval runs/sample --shuffle-images
      lookonce eval runs/sample --true-context --no-context
      lookonce eval runs/sample --set eval.max_new_tokens=8
      lookonce eval run.yaml --untuned
      lookonce eval runs/sample/run.yaml
      torchrun --nproc-per-node 4 -m lookonce eval runs/sample
    """
    check_launch()
    chosen: dict[Baseline, bool] = {
        "untuned": untuned,
        "shuffled": shuffle_images,
        "blank": blank_images,
        "true": true_context,
        "none": no_context,
    }
    named = tuple(name for name, is_chosen in chosen.items() if is_chosen)
    with only_results_on_stdout():
        from lookonce.eval.run import evaluate_run

    remember_run_file(run_dir, assignments)
    from lookonce.eval.scores.metrics import read_metrics
    from lookonce.run.folder import RunFolder

    done = evaluate_run(
        run_dir,
        split,
        "all" if baselines else named,
        assignments=assignments,
        verify_images=verify_images,
        notify=notify,
    )
    if done:  # on the first rank
        evaluation, path = done
        notify(f"predictions: {path}")
        folder = RunFolder(path.parent.parent)
        beside = {key: read_metrics(folder, f"{path.stem}-{key}") for key in evaluation.baselines}
        emit(evaluation.to_json(), evaluation.text({key: one for key, one in beside.items() if one}), as_json)
