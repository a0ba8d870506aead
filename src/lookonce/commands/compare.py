"""`lookonce compare`: whether one run is better than another. The work is done in `eval.compare`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from lookonce.commands.options import JSON, PATH, SPLIT, emit
from lookonce.eval.scores.prediction import Metric


@click.command()
@click.argument("paths", metavar="RUN...", type=PATH, nargs=-1, required=True)
@SPLIT
@click.option("--baseline", type=PATH, metavar="RUN", help="Compare the others with this run only, not all with all.")
@click.option(
    "--metric", type=click.Choice(get_args(Metric)), default="exact_match", show_default=True, help="What counts."
)
@JSON
def compare(paths: tuple[Path, ...], split: str | None, baseline: Path | None, metric: Metric, as_json: bool) -> None:
    """Show whether one run is better than another on the same questions.

    RUN is a run folder, a run file, or a file of predictions. The questions must be the same; they are joined by image,
    question and turn.

    The difference of each pair has a 95 % interval over images, and the p of 10,000 sign flips by image, corrected for
    the number of pairs (Holm). Fewer pairs are easier to tell apart: with --baseline, chosen
    before looking, there is one for each other run.

    Runs whose run files differ in `train.seed` alone count as one, with the mean of their scores and the spread between
    them. One is called better only if its interval does not hold 0, p is below 0.05, and it exceeds the spread.

    For sentences, of which hardly any is exactly right, --metric token_f1 compares the words that answers have in
    common with their references (SQuAD's F1). Choose the metric before looking.

    \b
    Keys of --json:
      num_questions, num_images
      metric, is_exact_match_poor (whether it says little about these answers)
      candidates   name, runs, seeds, exact_match, score (by the metric), interval, majority, spread
      pairs        first, second, difference (second less first), interval, p, p_holm, only_first, only_second,
                   spread, are_seeds, metric, better (a name or null), sentence
      prompts      which earlier answers stand in the prompts of each run, if runs differ: predicted, reference, none

    \b
    Examples:
      lookonce compare runs/first runs/second
      lookonce compare runs/exp1-* runs/exp2-* --split test --baseline runs/exp1-42
      lookonce compare runs/x1-first runs/x1-second --metric token_f1
      lookonce compare runs/first/predictions/val.jsonl runs/second/predictions/val.jsonl --json
    """
    from lookonce.errors import UsageError
    from lookonce.eval.compare import compare as run_comparison
    from lookonce.eval.compare import to_json, to_text
    from lookonce.eval.join import read_runs

    if baseline:
        paths = (baseline, *(path for path in paths if path.absolute() != baseline.absolute()))
    if len(paths) < 2:
        raise UsageError("comparing needs two runs; name them: lookonce compare RUN RUN")
    comparison = run_comparison(read_runs(paths, split), with_first_only=baseline is not None, metric=metric)
    emit(to_json(comparison), to_text(comparison), as_json)
