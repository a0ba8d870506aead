"""`lookonce adapter merge`: an adapter added to its model's weights. The work is done in `adapter.merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.adapter.group import adapter
from lookonce.commands.options import JSON, PATH, check_launch, emit, notify, only_results_on_stdout, remember_run_file
from lookonce.settings import MAX_COUNT

if TYPE_CHECKING:
    from lookonce.adapter.merging.merge import Dtype


@adapter.command("merge")
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Type of the tensors that the adapter changes; all others keep their bytes.",
)
@click.option(
    "--questions",
    "num_questions",
    type=click.IntRange(0, MAX_COUNT),
    default=64,
    show_default=True,
    help="At most this many validation questions are asked of both models; 0 asks none.",
)
@click.option(
    "--onto-unquantised",
    is_flag=True,
    help="Merge an adapter that was trained on quantised weights (train.frozen) into the unquantised ones.",
)
@JSON
def merge(run_dir: Path, folder: Path, dtype: Dtype, num_questions: int, onto_unquantised: bool, as_json: bool) -> None:
    """Merge a run's adapter into its model: a model folder that needs neither PEFT nor lookonce.

    RUN is the folder of a trained run, or its run file. DIR must not exist. It appears when it is complete; until then
    the files are in DIR.partial, and the same command continues there after an interruption.

    Only what the adapter changes is computed: in float32, and rounded once. All other tensors and files keep their
    bytes. With fp32 nothing is rounded, and the configuration says float32, so that transformers loads all weights in
    it. Then questions are asked of the model with its adapter and of the merged one, from the cache and with the run's
    settings: that shows what rounding costs. Merging takes little memory, asking as much as an evaluation.

    \b
    Keys of --json: folder, dtype, num_tensors, num_changed, size_bytes, rounding, is_untied, left_out, comparison
    (num_questions, num_different, adapter, merged, precision, different).

    \b
    Examples:
      lookonce adapter merge runs/sample models/sample-merged
      lookonce adapter merge runs/kvasir models/kvasir-merged --questions 500 --json
      lookonce adapter merge runs/kvasir models/kvasir-fp32 --dtype fp32 --questions 0
    """
    check_launch()
    with only_results_on_stdout():
        from lookonce.adapter.merging.merge import merge as merge_run

    if run_dir.is_file():
        remember_run_file(run_dir)
    with only_results_on_stdout():
        done = merge_run(run_dir, folder, dtype, num_questions, onto_unquantised=onto_unquantised, notify=notify)
    emit(done.to_json(), done.text(), as_json)
